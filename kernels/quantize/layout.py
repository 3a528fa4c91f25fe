"""How the copies of a matrix lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import grid
from .grouped import padded_length
from .nvfp4 import BLOCK


def empty_copy(x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, kind: str, groups: int = 0) -> list[Tensor]:
    """Return data and scales of x [..., R, C] by `block`, not filled, in x's orientation.

    With groups: grouped rows, padded where blocks span rows. The columnwise data of 128-blocks lies transposed in
    memory, which is how FP8 GEMMs read it and how it is stored; that of MXFP8 does not.
    """
    *batch, rows, columns = x.shape
    if groups and block[0] > 1:
        rows = padded_length(rows, groups, block[0])
    if block[0] > block[1] and kind != "e8m0":
        data = x.new_empty((*batch, columns, rows), dtype=fp8_dtype).mT
    else:
        data = x.new_empty((*batch, rows, columns), dtype=fp8_dtype)
    dtype = torch.uint8 if kind == "e8m0" else torch.float32
    return [data, x.new_empty((*batch, *grid(rows, columns, block)), dtype=dtype)]


def empty_transposed(x: Tensor, fp8_dtype: torch.dtype, rows: int | None = None) -> Tensor:
    """Return a copy of x [..., R, C] that lies transposed in memory, not filled; rows: if not R."""
    *batch, own_rows, columns = x.shape
    return x.new_empty((*batch, columns, own_rows if rows is None else rows), dtype=fp8_dtype).mT


def nvfp4_slots(rows: int, *, with_rht: bool, groups: int = 0) -> int:
    """Return how many columns NVFP4's columnwise copy of R rows has."""
    if groups:
        return padded_length(rows, groups, BLOCK)
    return -(-rows // BLOCK) * BLOCK if with_rht else rows


def empty_nvfp4(x: Tensor, *, rowwise: bool, columnwise: bool, with_rht: bool, groups: int = 0) -> list[Tensor]:
    """Return NVFP4's packed codes and scales of each copy of x [..., R, C], not filled; with groups: grouped rows."""
    *batch, rows, columns = x.shape
    shapes = [(rows, columns)] if rowwise else []
    shapes += [(columns, nvfp4_slots(rows, with_rht=with_rht, groups=groups))] if columnwise else []
    found: list[Tensor] = []
    for height, width in shapes:
        found.append(x.new_empty((*batch, height, -(-width // 2)), dtype=torch.uint8))
        found.append(x.new_empty((*batch, height, -(-width // BLOCK)), dtype=torch.float8_e4m3fn))
    return found
