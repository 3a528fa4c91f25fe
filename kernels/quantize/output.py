"""Quantization as the last step of another operation: which copies it makes, and what they must be.

Norms, activations and the permutation of tokens can hand out their result as FP8 without writing it in high precision
first. The numbers equal the result rounded to its dtype and then quantized: two definitions one after the other.
T rows, H columns.
"""

import dataclasses

import torch
from torch import Tensor

from te_models.suggestions import check_choice, shown

from ..custom_op import Output, like
from .fp8 import blocks, reference
from .fp8.blocks import grid
from .fp8.grouped import padded_length
from .fp8.reference import FP8_MAX
from .nvfp4.reference import BLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedOutput:
    """The FP8 copies of a result [T, H] that an operation makes.

    block: 0 for one given scale, as in delayed scaling; else blocks of 1 x block, columnwise block x 1, 128
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
            raise ValueError(f"block is {shown(self.block)}; allowed: 0 (one scale), 32, 128")
        check_choice("fp8_dtype", self.fp8_dtype, FP8_MAX)
        check_choice("scale_kind", self.scale_kind, ("float32", "pow2", "e8m0"))
        if not (self.rowwise or self.columnwise):
            raise ValueError("rowwise and columnwise are False; allowed: one of them, or both")

    def check_scale(self, scale: Tensor | None) -> None:
        """Raise ValueError unless there is a scale where, and only where, one is used."""
        if (scale is None) == (self.block == 0):
            raise ValueError(f"scale is {'None' if scale is None else 'given'} and block is {self.block}; allowed: one")

    def define(self, y: Tensor, scale: Tensor | None) -> list[Tensor]:
        """Quantize y [T, H], any dtype, in plain torch.

        With blocks: data and scales of each copy. With one scale (float32 scalar): each copy, then y's amax (float32
        scalar), from which the next scale is made. All in y's orientation, rowwise first.
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
            col = [transposed_copy(y, self.fp8_dtype)] if self.columnwise else []
            return [*row, *col, like(y, (), torch.float32)]
        found: list[Output] = []
        for wanted, block in ((self.rowwise, (1, self.block)), (self.columnwise, (self.block, 1))):
            if wanted:
                found += copy_by_blocks(y, block, self.fp8_dtype, self.scale_kind)
        return found


def copy_by_blocks(
    x: Tensor | Output, block: tuple[int, int], fp8_dtype: torch.dtype, kind: str, groups: int = 0
) -> list[Output]:
    """Describe data and scales of x [..., R, C] by `block`, in x's orientation.

    With groups: grouped rows, padded where blocks span rows. The columnwise data of 128-blocks lies transposed in
    memory, as FP8 GEMMs read it and as it is stored; the columnwise copy of MXFP8 does not.
    """
    *batch, rows, columns = x.shape
    if groups and block[0] > 1:
        rows = padded_length(rows, groups, block[0])
    transposed = block[0] > block[1] and kind != "e8m0"
    scales = like(x, (*batch, *grid(rows, columns, block)), torch.uint8 if kind == "e8m0" else torch.float32)
    return [like(x, (*batch, rows, columns), fp8_dtype, transposed=transposed), scales]


def transposed_copy(x: Tensor | Output, fp8_dtype: torch.dtype, rows: int | None = None) -> Output:
    """Describe a copy of x [..., R, C] that lies transposed in memory; rows: if not R."""
    *batch, own_rows, columns = x.shape
    return like(x, (*batch, own_rows if rows is None else rows, columns), fp8_dtype, transposed=True)


def nvfp4_slots(rows: int, *, with_rht: bool, groups: int = 0) -> int:
    """Return how many columns NVFP4's columnwise copy of R rows has."""
    if groups:
        return padded_length(rows, groups, BLOCK)
    return -(-rows // BLOCK) * BLOCK if with_rht else rows


def nvfp4_copies(
    x: Tensor | Output, *, rowwise: bool, columnwise: bool, with_rht: bool, groups: int = 0
) -> list[Output]:
    """Describe NVFP4's packed codes and scales of each copy of x [..., R, C]; with groups: grouped rows."""
    *batch, rows, columns = x.shape
    shapes = [(rows, columns)] if rowwise else []
    shapes += [(columns, nvfp4_slots(rows, with_rht=with_rht, groups=groups))] if columnwise else []
    found: list[Output] = []
    for height, width in shapes:
        found.append(like(x, (*batch, height, -(-width // 2)), torch.uint8))
        found.append(like(x, (*batch, height, -(-width // BLOCK)), torch.float8_e4m3fn))
    return found
