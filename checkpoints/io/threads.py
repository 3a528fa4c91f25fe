"""Threads for moving and computing data: each does its own torch work alone.

torch spreads one operation over all cores and waits for the slowest; on a machine with other work that is a thread that
is not running. A conversion has many independent parts, so here a thread takes a part and nobody waits for it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from te_models.lazy import torch
from te_models.memory import reuse_freed_memory

from .errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_threads(count: int) -> ThreadPoolExecutor:
    """Return `count` running threads on which a torch operation uses one thread; without torch, threads.

    They end with the pool: at the end of a with statement, or when nothing refers to it any more.
    """
    reuse_freed_memory()
    pool = ThreadPoolExecutor(count)
    if "torch" not in sys.modules:  # bytes are moved
        return pool
    before, barrier = torch.get_num_threads(), threading.Barrier(count)

    def start() -> None:
        torch.get_num_threads()  # a thread's first use of torch copies the setting, so that has to come before
        torch.set_num_threads(1)  # of this thread, and of threads that use torch for the first time from now on
        barrier.wait()

    wait([pool.submit(start) for _ in range(count)])
    torch.set_num_threads(before)
    return pool


def run_all(function: Callable[[T], R], items: Sequence[T], count: int, stop: threading.Event) -> list[R]:
    """Return `function` of every item, computed by up to `count` threads; on an error set `stop` and raise the error.

    With one thread or one item it is the calling thread that does the work, alone, too.
    """
    count = min(count, len(items))
    if count < 2 and "torch" not in sys.modules:
        return [function(item) for item in items]
    if count < 2:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [function(item) for item in items]
        finally:
            torch.set_num_threads(before)
    with start_threads(count) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise


def in_turn(pool: Executor, tasks: Iterable[Callable[[], T]], ahead: int) -> Iterator[T]:
    """Yield the results of tasks in their order, while up to `ahead` more are computed or wait to be taken."""
    running: deque[Future[T]] = deque()
    try:
        for task in tasks:
            running.append(pool.submit(task))
            if len(running) > ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) as data is written, by one thread at a time, though not always the same."""


class ByteProgress:
    """Counts the bytes of all files, tells the caller's `progress`, and stops every thread when one has failed."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.stop = threading.Event()
        self._total, self._done, self._progress = total, 0, progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes that were written, or found written."""
        if self.stop.is_set():
            raise CheckpointError("another file could not be written")
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total)
