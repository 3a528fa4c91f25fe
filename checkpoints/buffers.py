"""A few fixed buffers through which all data moves, so that memory does not grow with the checkpoint."""

from __future__ import annotations

import ctypes
from concurrent.futures import Future

import torch

CHUNK_BYTES = 1 << 20
"""Large enough that per-chunk Python costs nothing, small enough that a chunk is in the cache when it is hashed."""


class Buffer:
    """Memory as a torch tensor of bytes and as a memoryview, and the background work that still reads it."""

    def __init__(self, memory: bytearray | torch.Tensor) -> None:
        """memory: that of a contiguous tensor of bytes on the CPU is used as it is; the buffer keeps it alive."""
        if isinstance(memory, torch.Tensor):
            self.bytes = memoryview((ctypes.c_ubyte * len(memory)).from_address(memory.data_ptr()))
            self.tensor = memory
        else:
            self.bytes = memoryview(memory)
            self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.pending: list[Future[None]] = []

    def wait(self) -> None:
        """Wait until nobody reads the buffer any more."""
        while self.pending:
            self.pending.pop().result()


class Ring:
    """Buffers handed out in turn; one that is still being read is waited for."""

    def __init__(self, buffers: int = 8, nbytes: int = CHUNK_BYTES) -> None:
        self.nbytes = nbytes
        self._buffers = [Buffer(bytearray(nbytes)) for _ in range(buffers)]
        self._turn = 0

    def next(self) -> Buffer:
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        buffer.wait()
        return buffer
