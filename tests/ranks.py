"""Real processes that form a process group, for tests of anything distributed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

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
