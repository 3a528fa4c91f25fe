"""A training run in a process of its own, and ways to kill it with a real SIGKILL at a chosen place.

Children come from the fork server, so that a test can afford several of them."""

import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import te_models.checkpoints.io.atomic as atomic
import te_models.training.checkpoints.checkpoint as checkpoint
import te_models.training.loop as loop
from te_models.training import TrainConfig, read_metrics
from tests.fork_server import CONTEXT


def run_until_killed(config: TrainConfig, where: str, count: int) -> None:
    """Train in a child that SIGKILLs itself at the `count`-th event of kind `where`; assert that it died of that."""
    child = CONTEXT.Process(target=_run, args=(config.to_dict(), where, count))
    child.start()
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL, f"the child ended with {child.exitcode} and was not killed"


def run_and_kill_from_outside(config: TrainConfig, rows: int) -> None:
    """Train in a child and SIGKILL it, at whatever it is doing, as soon as `rows` metrics rows are there."""
    child = CONTEXT.Process(target=_run, args=(config.to_dict(), "never", 0))
    child.start()
    deadline = time.monotonic() + 120
    metrics = Path(config.output_dir) / "metrics.jsonl"
    while len(read_metrics(metrics)) < rows and child.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL, f"the child ended with {child.exitcode} before it was killed"


def _run(config: dict[str, Any], where: str, count: int) -> None:
    left = count

    def tick() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    def kill() -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    real_step, real_flush, real_write = loop.train_step, atomic.flush, checkpoint.write_tensors

    def step(*args: Any, **kwargs: Any) -> Any:
        return kill() if tick() else real_step(*args, **kwargs)

    def flush(path: Path) -> None:
        return kill() if tick() else real_flush(path)

    def write_tensors(path: Path, *args: Any) -> Any:
        record = real_write(path, *args)
        if tick():
            with path.open("ab") as file:
                file.truncate(path.stat().st_size // 2)
            kill()
        return record

    if where == "step":
        loop.train_step = step
    elif where == "flush":
        atomic.flush = flush
    elif where == "half a file":
        checkpoint.write_tensors = write_tensors
    else:
        assert where == "never"
    loop.train(TrainConfig.from_dict(config))
