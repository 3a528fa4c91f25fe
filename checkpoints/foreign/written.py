"""What the writers of checkpoints of other systems are handed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..io.boxes import Shape
from ..io.header import byte_count

if TYPE_CHECKING:
    import torch

CHUNK = 256 << 20
"""Bytes that are in memory at once."""


@dataclass(frozen=True)
class Written:
    """A tensor to write. rows: reads indices begin .. end - 1 of its first dimension, or all of a scalar."""

    name: str
    dtype: str
    shape: Shape
    rows: Callable[[int, int], torch.Tensor]

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield which indices are read at a time, begin and end; one span of a scalar, and of no elements."""
        count = self.shape[0] if self.shape else 1
        each = max(1, CHUNK * max(count, 1) // max(byte_count(self.dtype, self.shape), 1))
        for begin in range(0, max(count, 1), each):
            yield begin, min(begin + each, count)
