"""Real processes that form a process group, for tests of anything distributed."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.fork_server import Python

AFTER_A_FAILURE = 5
"""Seconds in which the ranks that are left end, too, or are killed."""


def run_on_ranks(arguments: list[str], *, ranks: int = 2, timeout: float, fresh: bool = False) -> list[str]:
    """Start so many Pythons with the environment that torchrun gives them; return what each printed.

    timeout: seconds for each. fresh: as for Python. A rank that fails fails the test with how each rank ended and what
    it wrote to stderr: the first may only have lost another that died.
    """
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared["OMP_NUM_THREADS"] = "1"
    processes = [
        Python(arguments, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, fresh=fresh)
        for rank in range(ranks)
    ]
    ended: list[str] = []
    printed: list[str] = []
    try:
        for rank, process in enumerate(processes):
            done = process.finish(timeout if len(ended) == len(printed) else AFTER_A_FAILURE)
            ended.append(f"rank {rank} ended with {done.returncode}:\n{done.stderr}")
            if done.returncode == 0:
                printed.append(done.stdout)
    finally:
        for process in processes:  # one that failed leaves the others waiting
            process.kill()
        assert len(printed) == len(ended), "\n".join(ended)
    return printed


def outcomes_on_ranks(
    module: str,
    results: Path,
    *arguments: str,
    ranks: int = 2,
    only: Iterable[str] | None = None,
    timeout: float,
    fresh: bool = False,
) -> list[dict[str, Any]]:
    """Run `python -m MODULE RESULTS ARGUMENTS` on so many ranks; return what each wrote, as JSON, to RESULTS.RANK: the
    outcome of every case, or of those in `only`."""
    if only is not None:
        Path(f"{results}.only").write_text(json.dumps(list(only)))
    run_on_ranks(["-m", module, str(results), *arguments], ranks=ranks, timeout=timeout, fresh=fresh)
    return [json.loads(Path(f"{results}.{rank}").read_text()) for rank in range(ranks)]


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def report_cases(cases: Mapping[str, Callable[[], object]], results: str) -> None:
    """On a rank: run cases over gloo, each with a compiler that has compiled nothing, and write what each came to, "ok"
    or a traceback, to the file `results.RANK`. Where there is a file `results.only`, it names those to run."""
    only = Path(f"{results}.only")
    if only.exists():
        cases = {name: cases[name] for name in json.loads(only.read_text())}
    dist.init_process_group("gloo")
    outcomes = {}
    for name, case in cases.items():
        torch._dynamo.reset()
        counters.clear()
        try:
            case()
            outcomes[name] = "ok"
        except Exception:  # reported per case by the test that reads this
            outcomes[name] = traceback.format_exc()
    Path(f"{results}.{dist.get_rank()}").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()
