"""Batches read ahead by a thread while a step runs.

What is read is a function of the position, so reading ahead changes no batch, and a run that resumes needs its position
and nothing of what had been read. An exception of the reader is raised in the step that needs the batch.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Reads what the next steps need; to be used in a `with`, at whose end the thread has ended.

    Args:
        read: What a step at a position needs.
        after: The position of the step after the one at a position.
        end: Nothing is read from this position on.
        depth: How many steps are read ahead; 0: none, and no thread.
    """

    def __init__(self, read: Callable[[int], T], *, after: Callable[[int], int], end: int, depth: int) -> None:
        self._read, self._after, self._end, self._depth = read, after, end, depth
        self._ahead: deque[tuple[int, Future[T]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="te_models-prefetch") if depth else None

    def at(self, position: int) -> T:
        """Return what a step at a position needs, and begin to read for the steps after it."""
        if self._thread is None:
            return self._read(position)
        if self._ahead and self._ahead[0][0] != position:
            self._drop()
        later = self._after(self._ahead[-1][0]) if self._ahead else position
        while not self._ahead or (len(self._ahead) <= self._depth and later < self._end):
            self._ahead.append((later, self._thread.submit(self._read, later)))
            later = self._after(later)
        return self._ahead.popleft()[1].result()

    def _drop(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._drop()
            self._thread.shutdown()
