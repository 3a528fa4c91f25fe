"""Quantization as the last step of another operation: which copies it makes, and what they must be.

Norms, activations and the permutation of tokens can hand out their result as FP8 without writing it in high precision
first. The numbers are those of the result rounded to its dtype and then quantized: two definitions one after the other.
T rows, H columns.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..custom_op import Output, like
from . import layout
from .fp8 import blocks, reference
from .fp8.reference import FP8_MAX


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedOutput:
    """The FP8 copies of a result [T, H] that an operation makes.

    block: 0 for one given scale, which is what delayed scaling has; else blocks of 1 x block, columnwise block x 1, 128
    or 32. scale_kind, epsilon: of blocks, as for `quantize_blockwise`. Raises ValueError for anything else.
    """

    block: int = 0
    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    scale_kind: str = "pow2"
    epsilon: float = 0.0
    rowwise: bool = True
    columnwise: bool = False

    def __post_init__(self) -> None:
        if self.block not in (0, 32, 128):
            raise ValueError(f"block is {self.block!r}; allowed: 0 (one scale), 32, 128")
        if self.fp8_dtype not in FP8_MAX:
            raise ValueError(f"fp8_dtype is {self.fp8_dtype}; allowed: {', '.join(map(str, FP8_MAX))}")
        if self.scale_kind not in ("float32", "pow2", "e8m0"):
            raise ValueError(f"scale_kind is {self.scale_kind!r}; allowed: 'float32', 'pow2', 'e8m0'")
        if not (self.rowwise or self.columnwise):
            raise ValueError("rowwise and columnwise are False; allowed: one of them, or both")

    def check_scale(self, scale: Tensor | None) -> None:
        """Raise ValueError unless there is a scale where, and only where, one is used."""
        if (scale is None) == (self.block == 0):
            raise ValueError(f"scale is {'None' if scale is None else 'given'} and block is {self.block}; allowed: one")

    def define(self, y: Tensor, scale: Tensor | None) -> list[Tensor]:
        """Quantize y [T, H], any dtype, in plain torch.

        With blocks: data and scales of each copy. With one scale (float32 scalar): each copy, then y's amax (float32
        scalar), which the next scale is made of. All in y's orientation, rowwise first.
        """
        if scale is not None:
            data = reference.quantize_per_tensor(y, scale, self.fp8_dtype)
            return [data] * (self.rowwise + self.columnwise) + [blocks.amax(y)]
        found: list[Tensor] = []
        for wanted, block in ((self.rowwise, (1, self.block)), (self.columnwise, (self.block, 1))):
            if wanted:
                found += reference.quantize_blockwise(y, block, self.fp8_dtype, self.scale_kind, epsilon=self.epsilon)
        return found

    def results(self, y: Tensor | Output) -> list[Output]:
        """Describe what `define` returns, as it lies on an accelerator. y: its shape and device count."""
        if self.block == 0:
            row = [like(y, dtype=self.fp8_dtype)] if self.rowwise else []
            col = [layout.transposed_copy(y, self.fp8_dtype)] if self.columnwise else []
            return [*row, *col, like(y, (), torch.float32)]
        found: list[Output] = []
        for wanted, block in ((self.rowwise, (1, self.block)), (self.columnwise, (self.block, 1))):
            if wanted:
                found += layout.copy_by_blocks(y, block, self.fp8_dtype, self.scale_kind)
        return found
