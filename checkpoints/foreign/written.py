"""What the writers of checkpoints of other systems are handed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..io.boxes import Shape

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
