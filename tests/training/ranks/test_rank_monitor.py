"""A rank that is stopped, killed or fails ends the others, which say its number; a signal to one rank reaches all."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from te_models.training import LostRankError, ParallelConfig, list_checkpoints
from tests.fork_server import run_python
from tests.training.checkpoints.test_interruption import FOREVER, endless
from tests.training.processes import exit_codes, stderr, training, wait_for_rows

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")


@pytest.mark.sentinels("3-1-9-0.05")
@pytest.mark.parametrize(
    ("ranks", "gone", "signum", "minutes"),
    [
        *((3, 1, signal.SIGSTOP, 3 / 60), (3, 1, signal.SIGKILL, 3 / 60), (2, 0, signal.SIGSTOP, 3 / 60)),
        *((4, 0, signal.SIGKILL, 600.0), (4, 2, signal.SIGKILL, 600.0)),
    ],
)
def test_a_rank_gone_ends_the_others(
    tmp_path: Path, ranks: int, gone: int, signum: signal.Signals, minutes: float
) -> None:
    """Each says which one is gone: before a timeout of hours, and where gloo itself waits for half an hour."""
    config = endless(tmp_path, distributed_timeout_minutes=minutes)
    with training(config, tmp_path, ranks=ranks) as processes:
        wait_for_rows(config, 2, processes)
        os.kill(processes[gone].pid, signum)
        left = [rank for rank in range(ranks) if rank != gone]
        assert {*exit_codes([processes[rank] for rank in left], timeout=600)} == {3}
    for rank in left:
        assert f"LostRankError: rank {gone} stopped answering" in stderr(tmp_path, rank).read_text()


@pytest.mark.slow
def test_a_pipeline_stage_that_is_gone_ends_the_others(tmp_path: Path) -> None:
    """torch wraps what a receive raises in errors of its own."""
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    config = endless(tmp_path, distributed_timeout_minutes=5 / 60, parallel=parallel)
    with training(config, tmp_path, ranks=2) as processes:
        wait_for_rows(config, 2, processes)
        os.kill(processes[1].pid, signal.SIGKILL)
        assert exit_codes(processes[:1], timeout=60) == [3]
    assert "rank 1 stopped answering" in stderr(tmp_path, 0).read_text()


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    config = endless(tmp_path)
    with training(config, tmp_path, ranks=2) as processes:
        wait_for_rows(config, 2, processes)
        os.kill(processes[1].pid, signal.SIGTERM)
        assert exit_codes(processes) == [143, 143]
    (saved,) = list_checkpoints(Path(config.output_dir))
    step = int(saved.name.removeprefix("step-"))
    assert f"step {step} of {FOREVER} is saved in {saved}" in stderr(tmp_path).read_text()
    assert "is saved" not in stderr(tmp_path, 1).read_text()


def monitors(count: int, timeout: float) -> list:
    """So many ranks' monitors on one store, all in this process."""
    from te_models.training.ranks.monitor import RankMonitor

    store, made = torch.distributed.HashStore(), [None] * count

    def make(rank: int) -> None:
        made[rank] = RankMonitor(store, rank, count, timeout)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def test_a_barrier_waits_longer_than_the_timeout() -> None:
    first, second = monitors(2, timeout=3.0)  # longer than a busy machine lets a thread wait
    late = threading.Thread(target=lambda: (time.sleep(4), first.barrier()))
    late.start()
    second.barrier()
    late.join()
    closing = threading.Thread(target=first.close, args=(None,))
    closing.start()
    second.close(None)
    closing.join()
    assert first.lost is None and second.lost is None


def test_a_failure_is_told_with_its_sentence() -> None:
    """To ranks in a barrier, and to those whose collective failed because of it."""
    first, second, third = monitors(3, timeout=20.0)
    second.close(ValueError("the disk\nis full"))
    with pytest.raises(LostRankError, match=r"^rank 1 failed: the disk is full$"):
        third.barrier()
    error = first.explain(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert isinstance(error, LostRankError) and str(error) == "rank 1 failed: the disk is full"
    own = ValueError("something else")
    assert first.explain(own) is own
    third.close(LostRankError("x"))
    first.close(error)


def test_a_rank_that_runs_but_does_not_take_part_is_named() -> None:
    first, second = monitors(2, timeout=1.5)
    error = first.explain(RuntimeError("Timed out waiting 5000ms for recv operation to complete"))
    assert "rank 1 runs but does not take part" in str(error)
    second.close(LostRankError("x"))
    first.close(error)


def test_processes_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Its main thread may wait in a collective that nothing interrupts."""
    from te_models.training.ranks import monitor as rank_monitor

    first, second = monitors(2, timeout=1.0)
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        second._closing = True

    monkeypatch.setattr(rank_monitor, "GRACE", 0.1)
    monkeypatch.setattr(rank_monitor.os, "_exit", end)
    first.close(ValueError("out of memory"))
    second._watcher.join(20)
    assert codes == [3] and "te-models: rank 1 ends: rank 0 failed: out of memory" in capfd.readouterr().err


KILLED = """
import os, signal, sys, time
import torch.distributed as dist
from te_models.training.ranks.monitor import LostRankError, RankMonitor

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
pid = os.fork()
if pid == 0:
    own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    monitor = RankMonitor(own, 1, 2, 600.0)
    monitor.interval = 0.1
    monitor.barrier()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
monitor = RankMonitor(store.clone(), 0, 2, 600.0)
monitor.interval = 0.1  # of heartbeats alone: the timeout is of minutes
monitor.barrier()
try:
    while True:  # computes: no collective tells
        monitor.check()
        time.sleep(0.05)
except LostRankError as error:
    print(error, flush=True)
    monitor.close(error)
os._exit(0)
"""


def test_a_silent_rank_of_another_node_is_named_once_a_signal_asks_to_end() -> None:
    """Before torchrun kills who waits for it in a barrier. The timeout is of hours."""
    first, second = monitors(2, timeout=3600.0)
    first.interval = 0.1
    second._exchange = lambda own: time.sleep(3600)  # a daemon's thread
    first.stop_asked = lambda: signal.SIGTERM
    begun = time.monotonic()
    with pytest.raises(LostRankError, match="rank 1 stopped answering"):
        first.barrier()
    assert time.monotonic() - begun < 60
    first.close(LostRankError(""))


def test_a_killed_rank_is_named_while_nobody_waits_for_it() -> None:
    """By the ranks of its machine, in a run that waits ten minutes for what does not answer."""
    done = run_python(["-c", KILLED], timeout=120)
    assert done.stdout == "rank 1 stopped answering\n", done.stderr
