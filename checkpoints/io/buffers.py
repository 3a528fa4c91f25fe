"""A few fixed buffers through which all data moves, so that memory does not grow with the checkpoint."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import Future
from functools import cached_property

from te_models.lazy import torch

CHUNK_BYTES = 1 << 20
"""Large enough that per-chunk Python costs nothing, small enough that a chunk is in the cache when it is hashed."""


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Return memory as bytes that can be written to; the caller keeps it alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address))


class Buffer:
    """Memory as a memoryview and as a torch tensor of bytes, and the background work that still reads it."""

    def __init__(self, memory: torch.Tensor | mmap.mmap) -> None:
        """memory: a contiguous tensor of bytes on the CPU, or a map of memory; the buffer keeps it alive."""
        self._memory = memory
        if isinstance(memory, mmap.mmap):
            self.bytes = memoryview(memory)
            self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        else:
            self.address = memory.data_ptr()
            self.bytes = bytes_at(self.address, len(memory))
        self.pending: list[Future[None]] = []

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The memory as a tensor of bytes."""
        return (
            torch.frombuffer(self._memory, dtype=torch.uint8) if isinstance(self._memory, mmap.mmap) else self._memory
        )

    def wait(self) -> None:
        """Wait until nobody reads the buffer any more."""
        while self.pending:
            self.pending.pop().result()


class Ring:
    """Buffers handed out in turn, each beginning at a page of memory; one that is still being read is waited for."""

    def __init__(self, buffers: int = 8, nbytes: int = CHUNK_BYTES) -> None:
        self.nbytes = nbytes
        # private, as memory of the process; pages that are never used are never there
        maps = [mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(buffers)]
        self._buffers = [Buffer(memory) for memory in maps]
        self._turn = 0

    def next(self) -> Buffer:
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        buffer.wait()
        return buffer

    def wait(self) -> None:
        """Wait until nobody reads any of the buffers, and raise what one's reader raised."""
        for buffer in self._buffers:
            buffer.wait()

    def pending(self) -> list[Future[None]]:
        """List the background work that still reads the buffers."""
        return [future for buffer in self._buffers for future in buffer.pending]
