"""How the copies of a matrix lie in memory: descriptions, from which kernels and the compiler allocate alike.

x, whose copies they are: a tensor, or the description of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..custom_op import Output, like
from .fp8.blocks import grid
from .fp8.grouped import padded_length
from .nvfp4.reference import BLOCK


def copy_by_blocks(
    x: Tensor | Output, block: tuple[int, int], fp8_dtype: torch.dtype, kind: str, groups: int = 0
) -> list[Output]:
    """Describe data and scales of x [..., R, C] by `block`, in x's orientation.

    With groups: grouped rows, padded where blocks span rows. The columnwise data of 128-blocks lies transposed in
    memory, which is how FP8 GEMMs read it and how it is stored; that of MXFP8 does not.
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
