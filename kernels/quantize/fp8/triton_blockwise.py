"""Blockwise FP8 quantization: both copies of a matrix in one pass over it.

A program holds a tile of whole blocks in registers: largest magnitudes, scales, the rowwise copy (blocks BR x BC) and
the columnwise copy (blocks BC x BR) come from one load.

Grouped rows: a group's tiles begin at its first row, so no block spans two groups, and padding costs no pass. Which
group a program serves is found on the device, from m_splits (see `grouped`).
"""

# A kernel takes plain values for the constexpr parameters that choose its branches; triton's types know neither.
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..output import copy_by_blocks
from ..triton_rounding import (
    e8m0_of_amax,
    float32_bits,
    inverse_of_e8m0,
    magnitude_bits,
    native_fp8,
    pow2_of_amax,
    power_of_two,
    reciprocal,
    scale_of_amax,
    to_fp8,
)
from ..triton_tiles import autotuned, grouped_tiles, size_class, store_tile, tile_of_group
from .grouped import padded_length
from .reference import FP8_MAX


@triton.jit
def quantize_tile(
    x,
    epsilon_bits,
    B_R: tl.constexpr,
    B_C: tl.constexpr,
    KIND: tl.constexpr,
    E4M3: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERFLOW: tl.constexpr,
    OVERFLOW_EXPONENT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantize the blocks [B_R, B_C] of a float32 tile: return codes [R, C] and stored scales [R / B_R, C / B_C]."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    shape: tl.constexpr = (R // B_R, B_R, C // B_C, B_C)
    amax = tl.max(tl.max(tl.reshape(magnitude_bits(x), shape), axis=3), axis=1)
    if KIND == "e8m0":
        byte = e8m0_of_amax(amax, 1.0 / LARGEST)
        scale = inverse_of_e8m0(byte)
        stored = byte.to(tl.uint8)
    elif KIND == "pow2":
        biased = pow2_of_amax(amax, E4M3, epsilon_bits, OVERFLOW_EXPONENT)
        scale, stored = power_of_two(biased), power_of_two(254 - biased)
    else:
        scale = scale_of_amax(amax, LARGEST, epsilon_bits, OVERFLOW)
        stored = reciprocal(scale)
    codes = to_fp8(tl.reshape(x, shape) * scale[:, None, :, None], E4M3, NATIVE)
    return tl.reshape(codes, (R, C)), stored


@triton.jit(do_not_specialize=["size_class", "epsilon_bits"])
def quantize_blockwise_kernel(
    x_ptr,
    row_data_ptr,
    row_scale_ptr,
    col_data_ptr,
    col_scale_ptr,
    m_splits_ptr,
    rows,
    padded_rows,
    columns,
    epsilon_bits,
    size_class,
    stride_r,
    stride_c,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    KIND: tl.constexpr,
    E4M3: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERFLOW: tl.constexpr,
    OVERFLOW_EXPONENT: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """One tile of x: [B, R, C], or of grouped rows [R, C] where G > 0. stride_r, stride_c: of the columnwise data
    inside one matrix; everything else is contiguous. padded_rows: rows of a copy whose blocks span several rows."""
    program = tl.program_id(0).to(tl.int64)
    column_tiles = tl.cdiv(columns, TILE_C)
    first_column = (program % column_tiles * TILE_C).to(tl.int32)
    tile = program // column_tiles
    row_width, col_width = tl.cdiv(columns, BC), tl.cdiv(columns, BR)
    if G > 0:
        group, first_row, end_row, first_slot, end_slot = tile_of_group(
            m_splits_ptr, tile, rows, padded_rows, G, G_BLOCK, TILE_R, BC
        )
    else:
        row_tiles = tl.cdiv(rows, TILE_R)
        matrix = tile // row_tiles
        first_row = tile % row_tiles * TILE_R
        end_row, first_slot, end_slot = rows, first_row, padded_rows
        x_ptr += matrix * rows * columns
        if ROWWISE:
            row_data_ptr += matrix * rows * columns
            row_scale_ptr += matrix * tl.cdiv(rows, BR) * row_width
        if COLUMNWISE:
            col_data_ptr += matrix * rows * columns
            col_scale_ptr += matrix * tl.cdiv(rows, BC) * col_width

    r = first_row + tl.arange(0, TILE_R)
    c = first_column + tl.arange(0, TILE_C)
    inside = (r < end_row)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + r[:, None] * columns + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROWWISE and BR == 1:
        codes, stored = quantize_tile(x, epsilon_bits, BR, BC, KIND, E4M3, LARGEST, OVERFLOW, OVERFLOW_EXPONENT, NATIVE)
        store_tile(row_data_ptr, codes, first_row, first_column, end_row, columns, columns, 1)
        store_tile(row_scale_ptr, stored, first_row, first_column // BC, end_row, row_width, row_width, 1)
    if G > 0:
        # rows past the last group are in no padded row
        x = tl.where(group < G, x, 0.0)
    if ROWWISE and BR > 1:
        codes, stored = quantize_tile(x, epsilon_bits, BR, BC, KIND, E4M3, LARGEST, OVERFLOW, OVERFLOW_EXPONENT, NATIVE)
        store_tile(row_data_ptr, codes, first_slot, first_column, end_slot, columns, columns, 1)
        end = tl.cdiv(end_slot, BR)
        store_tile(row_scale_ptr, stored, first_slot // BR, first_column // BC, end, row_width, row_width, 1)
    if COLUMNWISE:
        codes, stored = quantize_tile(x, epsilon_bits, BC, BR, KIND, E4M3, LARGEST, OVERFLOW, OVERFLOW_EXPONENT, NATIVE)
        store_tile(col_data_ptr, codes, first_slot, first_column, end_slot, columns, stride_r, stride_c)
        end = tl.cdiv(end_slot, BC)
        store_tile(col_scale_ptr, stored, first_slot // BC, first_column // BR, end, col_width, col_width, 1)


def _fits(arguments: dict, tile_r: int, tile_c: int) -> bool:
    br, bc = arguments["BR"], arguments["BC"]
    return tile_r % (bc if arguments["COLUMNWISE"] else br) == 0 and tile_c % (bc if arguments["ROWWISE"] else br) == 0


_kernel = autotuned(
    quantize_blockwise_kernel,
    _fits,
    key=("columns", "size_class", "BR", "BC", "KIND", "ROWWISE", "COLUMNWISE"),
)


def quantize_blockwise(
    x: Tensor,
    block: tuple[int, int],
    fp8_dtype: torch.dtype,
    kind: str,
    epsilon: float,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    m_splits: Tensor | None = None,
) -> list[Tensor]:
    """Return data and scales by `block` (rowwise), then by the transposed block (columnwise), as far as asked for.

    x: [..., R, C]; with m_splits [G] integer: grouped rows [R, C], as `grouped.quantize_grouped_blockwise`. block: not
    more rows than columns.
    """
    x = x.contiguous()
    rows, columns = x.shape[-2:]
    groups = 0 if m_splits is None else m_splits.shape[0]
    align = max(block)
    padded = padded_length(rows, groups, align) if groups else rows
    row = [c.empty() for c in copy_by_blocks(x, block, fp8_dtype, kind, groups)] if rowwise else []
    upright = (block[1], block[0])
    col = [c.empty() for c in copy_by_blocks(x, upright, fp8_dtype, kind, groups)] if columnwise else []
    if x.numel() == 0:
        return row + col

    def programs(meta: dict) -> tuple[int]:
        tile = meta["TILE_R"]
        tiles = grouped_tiles(rows, groups, align, tile) if groups else x.shape[:-2].numel() * triton.cdiv(rows, tile)
        return (tiles * triton.cdiv(columns, meta["TILE_C"]),)

    overflow = torch.finfo(x.dtype if x.dtype.itemsize <= 4 else torch.float32).max  # scales are float32
    _kernel[programs](
        x,
        *([t.view(torch.uint8) if t.dtype == fp8_dtype else t for t in row] or (None, None)),
        *([t.view(torch.uint8) if t.dtype == fp8_dtype else t for t in col] or (None, None)),
        None if m_splits is None else m_splits.contiguous(),
        rows,
        padded,
        columns,
        float32_bits(epsilon),
        size_class(x.numel()),
        *(col[0].stride()[-2:] if col else (columns, 1)),
        ROWWISE=rowwise,
        COLUMNWISE=columnwise,
        G=groups,
        G_BLOCK=triton.next_power_of_2(max(groups, 1)),
        BR=block[0],
        BC=block[1],
        KIND=kind,
        E4M3=fp8_dtype == torch.float8_e4m3fn,
        LARGEST=FP8_MAX[fp8_dtype],
        OVERFLOW=overflow,
        OVERFLOW_EXPONENT=126 + math.frexp(overflow)[1],
        NATIVE=native_fp8(x.device),
    )
    return row + col
