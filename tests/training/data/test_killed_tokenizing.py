"""Tokenizing killed within a shard goes on behind the last row it noted: bytes and batches are uninterrupted ones."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from te_models.training import TrainConfig, build_dataset
from te_models.training.data import part
from te_models.training.data.options import DocumentOptions
from tests.fork_server import CONTEXT
from tests.training.processes import train_on_ranks, training, wait_for_rows
from tests.training.runs import assert_same_bits, curve, tensors_under, tiny_run

ROWS = 60


def rows_of(folder: Path, name: str, *, bad: bool = False) -> None:
    """One file of rows: a data set with one shard. bad: some rows cannot be used."""
    rows = [{"text": f"{name} {i} " + "x" * (i * 7 % 13)} for i in range(ROWS)]
    text = "".join(json.dumps(row) + ("\n\n" if i % 5 == 0 else "\n") for i, row in enumerate(rows))
    if bad:
        text = text.replace(f'"{name} 9 ', '"').replace('"xxxxxxxxxxx"', '""') + '{"text": 3}\n'
    folder.mkdir()
    (folder / "rows.jsonl").write_text(text)


def build(out: str, text: str, options: dict[str, Any], kill: int, save_seconds: float) -> None:
    """Build a data set in this process, and SIGKILL it where it would write the document `kill`."""
    part.SAVE_SECONDS = save_seconds
    write, left = part._write_document, [kill]

    def counted(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*arguments)

    part._write_document = counted
    if options.pop("skip", False):
        options["options"] = DocumentOptions(skip_bad_rows=True)
    build_dataset(out, [text], "bytes", **options)


def killed(out: Path, text: str, kill: int, save_seconds: float = 0.0, **options: Any) -> None:
    child = CONTEXT.Process(target=build, args=(str(out), text, options, kill, save_seconds))
    child.start()
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL and not out.exists(), child.exitcode


def noted(out: Path) -> int:
    """How many rows of its one shard an interrupted run has noted."""
    (file,) = out.parent.glob(f".{out.name}.parts/*.partial/progress.json")
    return json.loads(file.read_text())["rows"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("stream", "bad"), [(False, False), (False, True), (True, False)])
@pytest.mark.filterwarnings("default")  # of what the libraries import
def test_a_killed_shard_goes_on_behind_its_last_row(
    tmp_path: Path, stream: bool, bad: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed three times, once before anything was noted; rows that are passed over are told once."""
    if stream:
        pytest.importorskip("datasets", reason="the extra data is not installed")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows_of(tmp_path / "rows", "a", bad=bad)
    text = f"hf://{tmp_path / 'rows'}" if stream else str(tmp_path / "rows/rows.jsonl")
    skip: dict[str, Any] = {"skip": True} if bad else {}
    options: dict[str, Any] = {"options": DocumentOptions(skip_bad_rows=True)} if bad else {}
    whole = build_dataset(tmp_path / "whole", [text], "bytes", **options)
    out = tmp_path / "out"
    killed(out, text, 7, 1e9, workers=workers, **skip)
    assert not list(tmp_path.glob(".out.parts/*.partial/progress.json"))
    killed(out, text, 20, workers=workers, **skip)
    first = noted(out)
    killed(out, text, 11, workers=workers, **skip)
    assert 20 <= first < first + 11 <= noted(out)
    damage = next(tmp_path.glob(".out.parts/*.partial/tokens.bin"))
    damage.write_bytes(damage.read_bytes() + b"\x07\x00\x01")  # what was written behind the note
    again = build_dataset(out, [text], "bytes", workers=workers, **options)
    assert files(again.path) == files(whole.path) and not list(tmp_path.glob(".out.parts"))


def test_a_stream_that_changed_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows before the note would be those of another data set."""
    pytest.importorskip("datasets", reason="the extra data is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows_of(tmp_path / "rows", "a")
    text, file = f"hf://{tmp_path / 'rows'}", tmp_path / "rows/rows.jsonl"
    killed(tmp_path / "out", text, 20)
    file.write_text(file.read_text().replace('"a 3 ', '"another 3 '))
    os.utime(file, (1, 1))
    changed = build_dataset(tmp_path / "out", [text], "bytes")
    assert files(changed.path) == files(build_dataset(tmp_path / "whole", [text], "bytes").path)


READ = """
import os, te_models.training.data.blend as blend
from safetensors.torch import save_file
read, examples = {}, blend.Blend.examples
def noting(self, position, size):
    batch = examples(self, position, size)
    read[str(position)] = batch.input_ids.clone()
    return batch
blend.Blend.examples = noting
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of what the libraries import
def test_ranks_read_the_batches_of_an_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shuffled mixture of two streams on two ranks: tokenizing is killed within each shard, then the run itself."""
    pytest.importorskip("datasets", reason="the extra data is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, kill in (("a", 20), ("b", 35)):
        rows_of(tmp_path / f"rows-{name}", name)
        text = f"hf://{tmp_path / f'rows-{name}'}"
        build_dataset(tmp_path / f"whole-{name}", [text], "bytes")
        killed(tmp_path / f"out-{name}", text, kill)
        build_dataset(tmp_path / f"out-{name}", [text], "bytes")

    def run_of(name: str, steps: int) -> TrainConfig:
        config = tiny_run(tmp_path, name, steps=steps)
        blend = (f"{tmp_path}/{name}-a=0.75", f"{tmp_path}/{name}-b=0.25")
        changes = {"path": None, "text": (), "tokenizer": None, "sequence_length": 16, "gradient_accumulation": 1}
        return config.replace(data=config.data.replace(blend=blend, **changes))

    def read(config: TrainConfig) -> list[dict[str, torch.Tensor]]:
        where = f"{tmp_path}/read"
        train_on_ranks(config, tmp_path, before=READ, after=f"save_file(read, '{where}' + os.environ['RANK'])")
        return [load_file(f"{where}{rank}") for rank in range(2)]

    steps = 40
    whole, part_of = run_of("whole", steps), run_of("out", steps)
    all_read = read(whole)
    with training(part_of, tmp_path, ranks=2) as processes:
        wait_for_rows(part_of, 5, processes)  # a checkpoint is after each second step
    assert len(curve(part_of)) < steps, "the run had ended before it was killed"
    for rank, again in enumerate(read(part_of)):
        assert 0 < len(again) < len(all_read[rank]) == steps
        assert all(torch.equal(ids, all_read[rank][position]) for position, ids in again.items())
    assert curve(part_of) == curve(whole)
    assert_same_bits(*(tensors_under(tmp_path / name / "final") for name in ("whole", "out")))
