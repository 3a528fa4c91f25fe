"""The description of a tensor that an operation returns: enough to allocate it, on a device as on fake tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Output:
    """A new tensor; never a view of an argument or of another result, which an operation may not return.

    shape: sizes may be symbolic; transposed: the last two dimensions lie swapped in memory, else it is contiguous.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False

    def empty(self) -> Tensor:
        """Allocate it, not filled."""
        if not self.transposed:
            return torch.empty(tuple(self.shape), dtype=self.dtype, device=self.device)
        *batch, rows, columns = self.shape
        return torch.empty((*batch, columns, rows), dtype=self.dtype, device=self.device).mT


def like(
    x: Tensor | Output,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    *,
    transposed: bool = False,
) -> Output:
    """Describe a result with x's device, and x's shape and dtype where none is given."""
    return Output(x.shape if shape is None else shape, dtype or x.dtype, x.device, transposed)


def matrix_like(x: Tensor, columns: int | None = None) -> Output:
    """Describe x [..., C] as a matrix [rows, C]; columns: if not C."""
    # not x.shape.numel(), which takes symbolic sizes for constants
    return like(x, (math.prod(x.shape[:-1]), x.shape[-1] if columns is None else columns))


def absent(x: Tensor, dtype: torch.dtype | None = None) -> Output:
    """Describe a result that was not asked for: without elements, [0], because a schema cannot leave one out."""
    return like(x, (0,), dtype)
