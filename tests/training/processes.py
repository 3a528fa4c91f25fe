"""Training commands in processes of their own, as ranks or alone, that a test stops, kills or sends signals to.

They come from the fork server."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from te_models.training import TrainConfig, read_metrics, train
from tests.build import parallel
from tests.fork_server import CONTEXT
from tests.ranks import free_port, run_on_ranks
from tests.training.runs import curve

TRAIN = """
import sys, torch
from pathlib import Path
from te_models.training import TrainConfig, train
torch.set_num_threads(1)
config = TrainConfig.from_json(Path(sys.argv[1]).read_text())
train(config)
"""


def train_on_ranks(
    config: TrainConfig, folder: Path, *, ranks: int = 2, before: str = "", after: str = "", timeout: float = 180
) -> None:
    """Call `train(config)` on so many ranks, with Python code around it on each. timeout: seconds."""
    file = folder / "config.json"
    file.write_text(config.to_json())
    run_on_ranks(["-c", before + TRAIN + after, str(file)], ranks=ranks, timeout=timeout)


def train_as_one_and_two(one: TrainConfig, folder: Path, layout: str) -> TrainConfig:
    """Train on one rank, and on two ranks in a layout with the same batches; return the second run."""
    train(one)
    two = one.replace(output_dir=str(folder / "two"), parallel=one.parallel.replace(**parallel(layout)))
    if layout not in ("tp2", "pp2"):  # each rank has data of its own
        two = two.replace(data=two.data.replace(gradient_accumulation=1))
    train_on_ranks(two, folder)
    return two


def continued_on_two_and_one(alone: TrainConfig, folder: Path, **changes: Any) -> Iterator[tuple[tuple, tuple]]:
    """Continue one rank's run as two ranks after step 2, and these as one after step 4; yield rows beside its own."""
    two, one = (alone.replace(output_dir=str(folder / name)) for name in ("two", "one"))
    for before, after, step in ((alone, two, 2), (two, one, 4)):
        checkpoint = Path("checkpoints") / f"step-{step:08d}"
        shutil.copytree(Path(before.output_dir) / checkpoint, Path(after.output_dir) / checkpoint)
        if after is two:
            data = two.data.replace(gradient_accumulation=two.data.gradient_accumulation // 2)
            train_on_ranks(two.replace(data=data, **changes), folder)
        else:
            train(one)
        yield from zip(curve(after), curve(alone)[step:], strict=True)


@contextmanager
def training(config: TrainConfig, folder: Path, *, ranks: int = 1) -> Iterator[list[BaseProcess]]:
    """Run `te-models train` on so many ranks; those that are left are killed at the end."""
    file = folder / "train.toml"
    file.write_text(as_toml(config))
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    try:
        for rank in range(ranks):
            environment = (shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) if ranks > 1 else {}
            process = CONTEXT.Process(target=_command, args=(str(file), environment, str(stderr(folder, rank))))
            process.start()
            started.append(process)
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


def stderr(folder: Path, rank: int = 0) -> Path:
    """Return the file that has what a rank wrote to standard error."""
    return folder / f"stderr.{rank}"


def wait_for_rows(config: TrainConfig, rows: int, processes: list[BaseProcess]) -> None:
    """Wait until so many steps are in the metrics."""
    deadline, metrics = time.monotonic() + 120, Path(config.output_dir) / "metrics.jsonl"
    while len(read_metrics(metrics)) < rows and time.monotonic() < deadline and all(p.is_alive() for p in processes):
        time.sleep(0.01)
    assert all(p.is_alive() for p in processes), "a process ended before the test did anything to it"


def exit_codes(processes: list[BaseProcess], timeout: float = 120) -> list[int | None]:
    """Return the exit codes of processes that end by themselves; None for one that does not."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


def as_toml(config: TrainConfig) -> str:
    """Return a configuration as TOML: inline tables in JSON's notation, which nearly is TOML's."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in config.to_dict().items() if value is not None)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(v)}" for key, v in value.items() if v is not None) + " }"
    return json.dumps(value)


def _command(file: str, environment: dict[str, str], stderr: str) -> None:
    os.environ |= environment
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    import torch

    from te_models.cli.main import main

    torch.set_num_threads(1)
    sys.exit(main(["train", file]))
