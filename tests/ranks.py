"""Real processes that form a process group, for tests of anything distributed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def run_on_ranks(arguments: list[str], *, ranks: int = 2, timeout: float) -> list[str]:
    """Start so many Pythons with the environment that torchrun gives them; return what each printed.

    timeout: seconds for each. A rank that fails fails the test with what it wrote to stderr.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=timeout)
            assert process.returncode == 0, errors
            printed.append(output)
    finally:
        for process in processes:  # one that failed leaves the others waiting
            with process:
                process.kill()
    return printed


def report_cases(cases: Mapping[str, Callable[[], object]], results: str) -> None:
    """On a rank: run cases over gloo and write what each came to, "ok" or a traceback, to the file `results.RANK`."""
    dist.init_process_group("gloo")
    outcomes = {}
    for name, case in cases.items():
        try:
            case()
            outcomes[name] = "ok"
        except Exception:  # reported per case by the test that reads this
            outcomes[name] = traceback.format_exc()
    Path(f"{results}.{dist.get_rank()}").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
