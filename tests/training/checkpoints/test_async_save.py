"""Checkpoints that a thread writes are, to the bit, those of a run that waits; a kill or an error costs one at most."""

import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from te_models.checkpoints import CheckpointError
from te_models.training import CheckpointConfig, PrecisionConfig, TrainConfig, list_checkpoints, train
from te_models.training.checkpoints import checkpoint as checkpoint_module
from te_models.training.checkpoints.background import BackgroundWriter, host_copies
from te_models.training.checkpoints.checkpoint import load_state
from tests.fork_server import run_python
from tests.training.processes import TRAIN, train_on_ranks
from tests.training.runs import assert_same_bits, curve, rows_of, tensors_under, tiny_run

ASYNC = CheckpointConfig(every=2, keep_last=0, async_save=True)
KILLED = """
import os, signal
from te_models.training.checkpoints import checkpoint
write = checkpoint.write_tensors
def once_more(file, tensors, *rest):
    written = write(file, tensors, *rest)
    if rest[0]["step"] == "4":
        os.kill(os.getpid(), signal.SIGKILL)
    return written
checkpoint.write_tensors = once_more
"""


def same_checkpoints(found: TrainConfig, expected: TrainConfig) -> None:
    """Equal tensors in every checkpoint and in the result, and equal curves."""
    names = [folder.name for folder in list_checkpoints(Path(expected.output_dir))]
    assert [folder.name for folder in list_checkpoints(Path(found.output_dir))] == names
    for name in [*(f"checkpoints/{name}" for name in names), "final"]:
        folders = (Path(config.output_dir) / name for config in (found, expected))
        assert_same_bits(*(tensors_under(folder) for folder in folders))
    assert curve(found) == curve(expected)


@pytest.mark.sentinels("True")
@pytest.mark.parametrize("quantized", [False, True])
def test_it_saves_what_a_run_that_waits_saves(quantized: bool, tmp_path: Path) -> None:
    formats = {"dtype": "bf16", "recipe": "mxfp8", "quantized_weights": True} if quantized else {"dtype": "fp32"}
    waiting = tiny_run(tmp_path, "waiting", moe=True, steps=5, precision=PrecisionConfig(**formats))
    going_on = waiting.replace(output_dir=str(tmp_path / "going_on"), checkpoint=ASYNC)
    for config in (waiting, going_on):
        train(config)
    same_checkpoints(going_on, waiting)


def test_a_run_killed_in_the_middle_goes_on_from_the_one_before(tmp_path: Path) -> None:
    waiting = tiny_run(tmp_path, "waiting", steps=6)
    train(waiting)
    killed = waiting.replace(output_dir=str(tmp_path / "killed"), checkpoint=ASYNC)
    (tmp_path / "config.json").write_text(killed.to_json())
    done = run_python(["-c", KILLED + TRAIN, str(tmp_path / "config.json")], timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = list_checkpoints(Path(killed.output_dir))
    assert load_state(left).step == 2
    assert len(list((Path(killed.output_dir) / "checkpoints").iterdir())) == 2, "and what the thread had begun"
    train(killed)
    same_checkpoints(killed, waiting)


def test_an_error_ends_the_run_at_its_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise CheckpointError("writing failed: no space left on device")

    config = tiny_run(tmp_path, steps=60, checkpoint=ASYNC)
    monkeypatch.setattr(checkpoint_module, "write_tensors", full)
    with pytest.raises(CheckpointError, match="no space left on device"):
        train(config)
    assert 2 <= len(rows_of(config)) < 60
    assert list_checkpoints(Path(config.output_dir)) == []


def test_one_is_written_at_a_time() -> None:
    writer, order = BackgroundWriter(), []
    release = threading.Event()
    writer.start(lambda: (release.wait(), order.append(1)))
    writer.check()
    release.set()
    writer.start(lambda: order.append(2))
    writer.finish()
    assert order == [1, 2]


def test_a_copy_does_not_change() -> None:
    weight = torch.ones(3)
    found = host_copies({"a": weight, "b": weight, "c": weight[:2]})
    weight.zero_()
    assert found["a"] is found["b"] and found["a"].sum() == 3 and found["c"].sum() == 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data_parallel_shard_size", "expert_model_parallel_size"])
def test_ranks_save_what_ranks_that_wait_save(layout: str, tmp_path: Path) -> None:
    waiting = tiny_run(tmp_path, "waiting", moe=True, steps=4)
    waiting = waiting.replace(parallel=waiting.parallel.replace(**{layout: 2}))
    going_on = waiting.replace(output_dir=str(tmp_path / "going_on"), checkpoint=ASYNC)
    for config in (waiting, going_on):
        train_on_ranks(config, tmp_path)
    if layout == "data_parallel_shard_size":
        same_checkpoints(going_on, waiting)
    resumed = going_on.replace(output_dir=str(tmp_path / "resumed"))
    checkpoint = Path("checkpoints") / "step-00000002"
    shutil.copytree(Path(going_on.output_dir) / checkpoint, Path(resumed.output_dir) / checkpoint)
    train_on_ranks(resumed, tmp_path)
    assert_same_bits(*(tensors_under(Path(config.output_dir) / "final") for config in (resumed, waiting)))
