"""The description of one result of an operation: enough to allocate it, on a device as on fake tensors.

`Result` is open: a folder above this one describes results of its own, such as quantized ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Result:
    """Base of descriptions: a value of one or more new tensors. None of them is a view of an argument or another."""

    def count(self) -> int:
        """Return how many tensors the value consists of."""
        raise NotImplementedError

    def allocate(self) -> list[Tensor]:
        """Allocate these tensors, not filled."""
        raise NotImplementedError

    def take(self, value: Any) -> list[Tensor]:
        """Return the tensors of a value that an implementation returned."""
        raise NotImplementedError

    def make(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value of its tensors: what was returned, with all that is not in the tensors."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Output(Result):
    """A new tensor.

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

    def count(self) -> int:
        return 1

    def allocate(self) -> list[Tensor]:
        return [self.empty()]

    def take(self, value: Any) -> list[Tensor]:
        return [value]

    def make(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]


@dataclasses.dataclass(frozen=True)
class Alias:
    """A result that is no new value: the argument of this name, or the earlier result at this position.

    A schema cannot return it, so it is left out there and put back by the caller.
    """

    of: str | int


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
