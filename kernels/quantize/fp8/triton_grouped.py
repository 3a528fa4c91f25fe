"""Dequantization of grouped rows in one pass: padded rows are read where they lie and written where they came from."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_rounding import from_e8m0, from_fp8
from ..triton_tiles import grouped_tiles, tile_of_group

TILE_R, TILE_C = 64, 128


@triton.jit
def dequantize_grouped_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    m_splits_ptr,
    rows,
    padded_rows,
    columns,
    stride_r,
    stride_c,
    scale_stride_r,
    scale_stride_c,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    PER_GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    E4M3: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """One tile of one group's rows. data is in padded rows where BR > 1; scales are one per block [BR, BC], or one per
    group. out: [rows, columns], contiguous."""
    program = tl.program_id(0).to(tl.int64)
    column_tiles = tl.cdiv(columns, TILE_C)
    first_column = program % column_tiles * TILE_C
    group, first_row, end_row, first_slot, _ = tile_of_group(
        m_splits_ptr, program // column_tiles, rows, padded_rows, G, G_BLOCK, TILE_R, BR
    )
    first = first_slot if BR > 1 else first_row
    counts = group < G
    r = tl.arange(0, TILE_R)
    c = first_column + tl.arange(0, TILE_C)
    inside = (first_row + r < end_row)[:, None] & (c < columns)[None, :]
    at = (first + r)[:, None] * stride_r + c[None, :] * stride_c
    values = from_fp8(tl.load(data_ptr + at, mask=inside & counts, other=0), E4M3)
    if PER_GROUP:
        product = values * tl.load(scale_ptr + tl.minimum(group, G - 1))
    else:
        shape: tl.constexpr = (TILE_R // BR, BR, TILE_C // BC, BC)
        sr = tl.arange(0, TILE_R // BR)
        sc = first_column // BC + tl.arange(0, TILE_C // BC)
        scale_inside = (first_row + sr * BR < end_row)[:, None] & (sc < tl.cdiv(columns, BC))[None, :] & counts
        scale_at = (first // BR + sr)[:, None] * scale_stride_r + sc[None, :] * scale_stride_c
        stored = tl.load(scale_ptr + scale_at, mask=scale_inside, other=0)
        scale = from_e8m0(stored.to(tl.int32)) if E8M0 else stored
        product = tl.reshape(tl.reshape(values, shape) * scale[:, None, :, None], (TILE_R, TILE_C))
    product = tl.where(counts, product, 0.0)
    out_at = (first_row + r)[:, None] * columns + c[None, :]
    tl.store(out_ptr + out_at, product.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize_grouped_fp8(
    data: Tensor, stored: Tensor, m_splits: Tensor, rows: int, block: tuple[int, int] | None, dtype: torch.dtype
) -> Tensor:
    """See `dequantize_grouped.dequantize_grouped`."""
    columns, groups = data.shape[1], m_splits.shape[0]
    out = data.new_empty((rows, columns), dtype=dtype)
    if out.numel() == 0:
        return out
    br, bc = block or (1, 1)
    tile_r, tile_c = max(TILE_R, br), max(TILE_C, bc)
    tiles = grouped_tiles(rows, groups, br, tile_r)
    dequantize_grouped_kernel[(tiles * triton.cdiv(columns, tile_c),)](
        data.view(torch.uint8),
        stored,
        out,
        m_splits.contiguous(),
        rows,
        data.shape[0],
        columns,
        *data.stride(),
        *(stored.stride() if block else (0, 0)),
        G=groups,
        G_BLOCK=triton.next_power_of_2(groups),
        BR=br,
        BC=bc,
        PER_GROUP=block is None,
        E8M0=stored.dtype == torch.uint8,
        E4M3=data.dtype == torch.float8_e4m3fn,
        TILE_R=tile_r,
        TILE_C=tile_c,
    )
    return out
