"""On how many threads a C++ function runs: on torch's, where one thread would need longer than waiting may take.

A parallel region ends when its last thread ends, and a thread that has to wait for a processor, because another process
uses it, begins milliseconds later. So a region is worth it only where one thread would compute for about that long.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

LEAST_NS = 500_000
"""Of the work of one thread, in nanoseconds: shorter calls stay on one."""


class _Spared(threading.local):
    count = 0
    """How many threads torch had before `on_one_thread`; 0 outside of it."""


_spared = _Spared()


def threads_for(nanoseconds: float) -> int:
    """Return the number of threads for a call that one thread computes in about this many nanoseconds."""
    return (_spared.count or torch.get_num_threads()) if nanoseconds >= LEAST_NS else 1


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Inside, this Python thread runs torch's own operations on one thread; `threads_for` goes on as before."""
    if _spared.count or torch.get_num_threads() == 1:
        yield
        return
    _spared.count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_spared.count)
        _spared.count = 0
