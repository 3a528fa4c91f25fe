"""Ranks that are killed, hang or are slow: the others name them, show where they are, and go on without them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from te_models.config import ConfigError
from te_models.training import CheckpointConfig, DiLoCoConfig, TrainConfig, read_metrics, train
from te_models.training.data.batch_size import with_global_batch
from te_models.training.ranks.monitor import show_stacks
from te_models.training.row import STEPS, Stragglers, busy_seconds
from tests.ranks import free_port
from tests.training.processes import as_toml, train_on_ranks
from tests.training.ranks.test_rank_monitor import monitors
from tests.training.runs import assert_same_bits, rows_of, tensors_under, tiny_run

ROOT = Path(__file__).parents[3]


def test_the_batch_of_all_ranks_stays_the_same(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    data = config.data.replace(gradient_accumulation=1, global_batch_size=8)
    config = config.replace(data=data)
    assert [with_global_batch(config, n).data.gradient_accumulation for n in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ConfigError, match=r"data.global_batch_size is 8; allowed: a multiple of 6, the windows"):
        with_global_batch(config, 3)
    with pytest.raises(ConfigError, match=r"data.gradient_accumulation is 2; allowed: 1, or unset"):
        data.replace(gradient_accumulation=2)


def test_a_straggler_is_named_once() -> None:
    slow = Stragglers()
    told = []
    for _ in range(2 * STEPS):
        columns = slow.step([1.0, 1.1, 2.0, 0.9])
        told.append(slow.news)
    assert columns == {"compute_s_min": 0.9, "compute_s_max": 2.0, "slowest_rank": 2}
    sentence = f"rank 2 computes 2.0 times as long as the median rank, for {STEPS} steps in a row"
    assert [news for news in told if news] == [sentence]
    assert told[STEPS - 1]


def test_sleeping_is_no_computing() -> None:
    before = busy_seconds()
    time.sleep(0.3)
    slept = busy_seconds() - before
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        pass
    assert slept < 0.25 and busy_seconds() - before >= 0.3


def test_ranks_show_where_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    """Of a rank that does not take part, the others time out; all print their stacks."""
    first, second = monitors(2, timeout=1.5)
    first.explain(RuntimeError("Timed out waiting 5000ms for recv operation to complete"))
    second.close(None)
    first.close(None)
    told = capfd.readouterr().err
    assert "rank 0 is here:" in told and "test_ranks_show_where_they_are" in told
    show_stacks(3, "rank 1 stopped answering")
    assert "te-models: rank 1 stopped answering; rank 3 is here:" in capfd.readouterr().err


SLOW_RANK = """
import os, time
from te_models.training.ranks import reduction
finish = reduction.Reduction.finish
def slowly(self):
    end = time.thread_time() + 0.3 * (os.environ["RANK"] == "1")
    while time.thread_time() < end: pass
    finish(self)
reduction.Reduction.finish = slowly
"""


@pytest.mark.slow
def test_a_rank_that_computes_longer_is_in_the_metrics(tmp_path: Path) -> None:
    """All ranks take the same time, because they wait for it."""
    config = tiny_run(tmp_path, steps=4)
    train_on_ranks(config, tmp_path, before=SLOW_RANK)
    for row in rows_of(config)[1:]:
        assert row["slowest_rank"] == 1 and row["compute_s_max"] - row["compute_s_min"] > 0.15


SCRIPT = """
import json, os, signal, sys, time
import torch
torch.set_num_threads(1)
sys.path.insert(0, {root!r})
from te_models.cli.main import main
from te_models.training import loop
plain, what = loop.train_step, json.loads(sys.argv[2])
def hang_here(): time.sleep(1000)
def step(*arguments, **options):
    if what["first"] and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0": return plain(*arguments, **options)
    if options["step"] == what["step"] and int(os.environ["RANK"]) == what["rank"]:
        if what["do"] == "kill": os.kill(os.getpid(), signal.SIGKILL)
        hang_here()
    time.sleep(what["pause"])
    return plain(*arguments, **options)
loop.train_step = step
sys.exit(main(["train", sys.argv[1]]))
"""


def agent(folder: Path, what: dict[str, object], *options: str, log: str = "agent") -> subprocess.Popen[bytes]:
    """Start torchrun on a run of `folder`, in a session of its own."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    values = {"do": "", "step": 3, "rank": 1, "first": True, "pause": 0.0} | what
    words = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(folder / "run.toml")]
    with (folder / log).open("wb") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*words, json.dumps(values)], stdout=output, stderr=output, env=environment, start_new_session=True
        )


def run_of(folder: Path, **changes: object) -> tuple:
    config = tiny_run(folder, steps=6, checkpoint=CheckpointConfig(every=1, keep_last=0), **changes)
    config = config.replace(data=config.data.replace(gradient_accumulation=1, global_batch_size=4))
    (folder / "run.toml").write_text(as_toml(config))
    return config, config.replace(output_dir=str(folder / "alone"))


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again_after_one_was_killed(tmp_path: Path) -> None:
    config, alone = run_of(tmp_path)
    process = agent(
        tmp_path, {"do": "kill"}, "--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port())
    )
    assert process.wait(300) == 0, (tmp_path / "agent").read_text()[-4000:]
    train_on_ranks(alone, tmp_path)
    found, right = (tensors_under(Path(run.output_dir) / "final") for run in (config, alone))
    assert_same_bits(found, right)
    assert [row["step"] for row in rows_of(config)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all_and_every_rank_shows_its_stack(tmp_path: Path) -> None:
    _, _ = run_of(tmp_path, distributed_timeout_minutes=4 / 60)
    process = agent(
        tmp_path, {"do": "hang"}, "--nproc-per-node", "2", "--max-restarts", "0", "--master-port", str(free_port())
    )
    assert process.wait(300) != 0
    told = (tmp_path / "agent").read_text()
    assert "rank 0 is here:" in told and "rank 1 is here:" in told and "hang_here" in told
    assert "rank 1 runs but does not take part" in told


def starts_after_losing_a_node(config: TrainConfig, tmp_path: Path) -> list[dict]:
    """Run with two agents of one process each, of which the second is killed; return how the run was started."""
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "run", "--rdzv-conf", "last_call_timeout=4"]
    first = agent(tmp_path, {"pause": 1.0}, *options, log="first")
    time.sleep(1)
    second = agent(tmp_path, {"pause": 1.0}, *options, log="second")
    metrics, deadline = Path(config.output_dir) / "metrics.jsonl", time.monotonic() + 200
    while len(read_metrics(metrics)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(second.pid)], capture_output=True, text=True, check=False)
    for pid in [*map(int, children.stdout.split()), second.pid]:
        os.kill(pid, signal.SIGKILL)
    try:
        assert first.wait(300) == 0, (tmp_path / "first").read_text()[-4000:]
    finally:
        first.kill()
        first.wait()
        second.wait()
    starts = [json.loads(line) for line in (Path(config.output_dir) / "starts.jsonl").read_text().splitlines()]
    assert [start["environment"]["ranks"] for start in starts] == [2, 1]
    return starts


@pytest.mark.slow
def test_fewer_ranks_go_on_when_a_node_is_gone(tmp_path: Path) -> None:
    """The first agent goes on alone from the newest checkpoint."""
    config, alone = run_of(tmp_path)
    starts_after_losing_a_node(config, tmp_path)
    train(alone)
    rows, right = (rows_of(run) for run in (config, alone))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in right], rel=1e-5)


@pytest.mark.slow
def test_fewer_replicas_go_on_when_a_node_is_gone(tmp_path: Path) -> None:
    """Local steps: the replica that is left goes on from the newest checkpoint as one that is started so."""
    config, alone = run_of(tmp_path, diloco=DiLoCoConfig(inner_steps=3))
    starts = starts_after_losing_a_node(config, tmp_path)
    begun = Path(config.output_dir) / "checkpoints" / f"step-{starts[-1]['step']:08}"
    train(alone.replace(resume_from=str(begun)))
    found, right = (tensors_under(Path(run.output_dir) / "final") for run in (config, alone))
    assert_same_bits(found, right)
    assert [row["step"] for row in rows_of(config)] == [1, 2, 3, 4, 5, 6]
