"""Real processes that form a process group, for tests of anything distributed."""

import atexit
import contextlib
import faulthandler
import functools
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.covering import EVERYDAY
from tests.fork_server import CONTEXT, LIVE, ROOT, Python

AFTER_A_FAILURE = 5
"""Seconds in which the ranks that are left end, too, or are killed."""
TIMEOUT = 300
"""Seconds in which a test ends on all ranks, and a collective."""


Test = Callable[..., None]


def on_ranks(
    ranks: int, *, timeout: float = TIMEOUT, within: Callable[[], AbstractContextManager[object]] | None = None
) -> Callable[[Test], Test]:
    """Run a test's body on so many ranks: in worker processes over gloo that the tests of a file share.

    Each rank calls the test with what its fixtures and parameters are here, which are pickled, after `manual_seed(0)`
    and with a compiler that has compiled nothing. The test fails with the traceback of each rank that fails, with what
    one that died wrote, and with the stack of one that has not ended after `timeout` seconds; the workers of a test
    that fails are killed, and the next test gets new ones. within: a context that each rank enters for the body."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def start(**arguments: object) -> None:
            __tracebackhide__ = True
            failure = _workers(test.__module__, ranks).run(test.__qualname__, arguments, timeout)
            if isinstance(failure, _Skipped):
                pytest.skip(str(failure))
            if failure is not None:
                pytest.fail(str(failure), pytrace=False)

        start.within = within or contextlib.nullcontext
        return start

    return decorate


class _Skipped(str):
    """Why the ranks skip a test."""


class _Workers:
    """Processes that wait for tests of a module to run, one a rank."""

    def __init__(self, module: str, ranks: int) -> None:
        self.module = module
        self._written = tempfile.TemporaryDirectory()
        self._files = [Path(self._written.name) / str(rank) for rank in range(ranks)]
        self._ends, self._processes = [], []
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank, file in enumerate(self._files):
            end, other = CONTEXT.Pipe()
            environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            process = CONTEXT.Process(target=_serve, args=(other, module, dict(environment), str(file), EVERYDAY[0]))
            process.start()
            other.close()
            self._ends.append(end)
            self._processes.append(process)

    def run(self, test: str, arguments: dict[str, object], timeout: float) -> str | None:
        """Run a test on all ranks; return None if all end well, otherwise what is wrong, and then they are killed."""
        for end in self._ends:
            with contextlib.suppress(BrokenPipeError):  # the rank died, which its silence tells below
                end.send((test, arguments))
        waiting = dict(zip(self._ends, range(len(self._ends)), strict=True))
        found: dict[int, str | None] = {}
        until = time.monotonic() + timeout
        while waiting and (ready := wait(waiting, max(0.0, until - time.monotonic()))):
            for end in ready:
                rank = waiting.pop(end)
                try:
                    found[rank], LIVE[self._processes[rank].pid] = end.recv()
                except EOFError:
                    found[rank] = self._died(rank)
                if found[rank] is not None:
                    until = min(until, time.monotonic() + AFTER_A_FAILURE)
        if all(text is None for text in found.values()) and not waiting:
            return None
        failed = found | {rank: self._hangs(rank) for rank in waiting.values()}
        self.end()
        skipped = [text for text in failed.values() if isinstance(text, _Skipped)]
        if len(skipped) == len(failed):
            return skipped[0]
        return "\n".join(f"rank {rank} of {len(failed)}: {text}" for rank, text in sorted(failed.items()) if text)

    def _died(self, rank: int) -> str:
        self._processes[rank].join(AFTER_A_FAILURE)
        return f"the process ended with {self._processes[rank].exitcode}:\n{self._files[rank].read_text()}"

    def _hangs(self, rank: int) -> str:
        """Return the stack of a rank that has not answered: its process writes it when it gets the signal."""
        process = self._processes[rank]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        process.join(1)
        return f"has not ended:\n{self._files[rank].read_text()}"

    def end(self) -> None:
        """Kill the processes."""
        _STARTED.pop(len(self._processes), None)
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.kill()
            LIVE.pop(process.pid, None)
        for process in self._processes:
            process.join()
        self._written.cleanup()


_STARTED: dict[int, _Workers] = {}
"""Number of ranks -> the workers of the file whose tests run."""


def _workers(module: str, ranks: int) -> _Workers:
    """Return the workers of a file; those of the file before it end."""
    for workers in [*_STARTED.values()]:
        if workers.module != module:
            workers.end()
    if ranks not in _STARTED:
        _STARTED[ranks] = _Workers(module, ranks)
    return _STARTED[ranks]


@atexit.register
def _end_all() -> None:
    for workers in [*_STARTED.values()]:
        workers.end()


def _serve(end: Connection, module: str, environment: dict[str, str], file: str, everyday: bool) -> None:
    """On a rank: run the tests of a module that are asked for, until there is nobody who asks."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for descriptor in (1, 2):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    sys.path.insert(0, str(ROOT))
    EVERYDAY[0] = everyday
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    while True:
        try:
            test, arguments = end.recv()
        except EOFError:
            os._exit(0)
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        answer: str | None = None
        try:
            body = getattr(importlib.import_module(module), test)
            with body.within():
                body.__wrapped__(**arguments)
        except pytest.skip.Exception as skipped:
            answer = _Skipped(skipped)
        except (Exception, pytest.fail.Exception):  # the test that waits reports it
            answer = traceback.format_exc()
        end.send((answer, time.process_time()))


def everyones(value: Any) -> list[Any]:
    """On a rank: return what each rank calls this with, in the order of ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def own_part(t: torch.Tensor) -> torch.Tensor:
    """On a rank: return its part of a tensor along the first dimension."""
    return t.chunk(dist.get_world_size())[dist.get_rank()]


def run_on_ranks(arguments: list[str], *, ranks: int = 2, timeout: float, fresh: bool = False) -> list[str]:
    """Start so many Pythons with the environment that torchrun gives them; return what each printed.

    timeout: seconds for each. fresh: as for Python. A rank that fails fails the test with how each rank ended and what
    it wrote to stderr: the first may only have lost another that died."""
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


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
