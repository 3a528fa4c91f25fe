"""Per-tensor FP8: amax, the cast with a given scale (both copies in one pass); dequantization of every FP8 format."""

# A kernel takes plain values for the constexpr parameters that choose its branches; triton's types know neither.
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..output import transposed_copy
from ..triton_rounding import from_e8m0, from_fp8, magnitude_bits, native_fp8, to_fp8
from ..triton_tiles import grouped_tiles, store_tile, tile_of_group
from .grouped import padded_length

TILE_R, TILE_C = 64, 128
AMAX_STEPS = 8


@triton.jit
def amax_kernel(
    x_ptr,
    amax_ptr,
    m_splits_ptr,
    rows,
    columns,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Raise amax_ptr[matrix or group], float32 bits, to the largest magnitude in STEPS tiles side by side. Integers
    have one maximum whatever the order, so the result does not depend on it."""
    program = tl.program_id(0).to(tl.int64)
    strips = tl.cdiv(columns, TILE_C * STEPS)
    first_column = (program % strips * (TILE_C * STEPS)).to(tl.int32)
    tile = program // strips
    if G > 0:
        matrix, first_row, end_row, _, _ = tile_of_group(m_splits_ptr, tile, rows, rows, G, G_BLOCK, TILE_R, 1)
        counts = matrix < G
    else:
        row_tiles = tl.cdiv(rows, TILE_R)
        matrix = tile // row_tiles
        first_row, end_row = tile % row_tiles * TILE_R, rows
        x_ptr += matrix * rows * columns
        counts = matrix >= 0
    r = first_row + tl.arange(0, TILE_R)
    largest = tl.zeros([TILE_R, TILE_C], tl.int32)
    for step in range(STEPS):
        c = first_column + step * TILE_C + tl.arange(0, TILE_C)
        inside = (r < end_row)[:, None] & (c < columns)[None, :]
        x = tl.load(x_ptr + r[:, None] * columns + c[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude_bits(x))
    tl.atomic_max(amax_ptr + matrix, tl.max(tl.max(largest, axis=1), axis=0), mask=counts, sem="relaxed")


@triton.jit
def quantize_per_tensor_kernel(
    x_ptr,
    scale_ptr,
    row_ptr,
    col_ptr,
    m_splits_ptr,
    rows,
    padded_rows,
    columns,
    scale_stride_m,
    scale_stride_r,
    scale_stride_c,
    ALIGN: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    SCALE_R: tl.constexpr,
    SCALE_C: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """One tile of x: [B, R, C], or of grouped rows [R, C] where G > 0, with a scale per matrix or group; SCALE_R,
    SCALE_C: also per row, per column. col_ptr: the transpose, [B, C, R], or [C, padded_rows]."""
    program = tl.program_id(0).to(tl.int64)
    column_tiles = tl.cdiv(columns, TILE_C)
    first_column = (program % column_tiles * TILE_C).to(tl.int32)
    tile = program // column_tiles
    if G > 0:
        matrix, first_row, end_row, first_slot, end_slot = tile_of_group(
            m_splits_ptr, tile, rows, padded_rows, G, G_BLOCK, TILE_R, ALIGN
        )
        in_matrix = matrix < G
    else:
        row_tiles = tl.cdiv(rows, TILE_R)
        matrix = tile // row_tiles
        first_row, end_row = tile % row_tiles * TILE_R, rows
        first_slot, end_slot = first_row, padded_rows
        in_matrix = matrix >= 0
        x_ptr += matrix * rows * columns
        if ROWWISE:
            row_ptr += matrix * rows * columns
        if COLUMNWISE:
            col_ptr += matrix * rows * columns
    r = first_row + tl.arange(0, TILE_R)
    c = first_column + tl.arange(0, TILE_C)
    inside = (r < end_row)[:, None] & (c < columns)[None, :] & in_matrix
    x = tl.load(x_ptr + r[:, None] * columns + c[None, :], mask=inside, other=0.0).to(tl.float32)
    scale_ptr += matrix * scale_stride_m
    if SCALE_R or SCALE_C:
        at = tl.zeros([TILE_R, TILE_C], tl.int64)
        if SCALE_R:
            at += (r * scale_stride_r)[:, None]
        if SCALE_C:
            at += (c.to(tl.int64) * scale_stride_c)[None, :]
        scale = tl.load(scale_ptr + at, mask=inside, other=1.0)
    else:
        scale = tl.load(scale_ptr, mask=in_matrix, other=1.0)
    codes = to_fp8(x * scale, E4M3, NATIVE)
    if ROWWISE:
        store_tile(row_ptr, codes, first_row, first_column, end_row, columns, columns, 1)
    if COLUMNWISE:
        store_tile(col_ptr, codes, first_slot, first_column, end_slot, columns, 1, padded_rows)


@triton.jit
def dequantize_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    stride_m,
    stride_r,
    stride_c,
    scale_stride_m,
    scale_stride_r,
    scale_stride_c,
    BR: tl.constexpr,
    BC: tl.constexpr,
    E8M0: tl.constexpr,
    E4M3: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """One tile of data [B, R, C], strided, times the scale of its block [BR, BC]; out is contiguous."""
    program = tl.program_id(0).to(tl.int64)
    column_tiles, row_tiles = tl.cdiv(columns, TILE_C), tl.cdiv(rows, TILE_R)
    first_column = program % column_tiles * TILE_C
    first_row = program // column_tiles % row_tiles * TILE_R
    matrix = program // column_tiles // row_tiles
    r = first_row + tl.arange(0, TILE_R)
    c = first_column + tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    at = matrix * stride_m + r[:, None] * stride_r + c[None, :] * stride_c
    shape: tl.constexpr = (TILE_R // BR, BR, TILE_C // BC, BC)
    values = tl.reshape(from_fp8(tl.load(data_ptr + at, mask=inside, other=0), E4M3), shape)
    sr = first_row // BR + tl.arange(0, TILE_R // BR)
    sc = first_column // BC + tl.arange(0, TILE_C // BC)
    scale_inside = (sr < tl.cdiv(rows, BR))[:, None] & (sc < tl.cdiv(columns, BC))[None, :]
    scale_at = matrix * scale_stride_m + sr[:, None] * scale_stride_r + sc[None, :] * scale_stride_c
    stored = tl.load(scale_ptr + scale_at, mask=scale_inside, other=0)
    scale = from_e8m0(stored.to(tl.int32)) if E8M0 else stored
    product = tl.reshape(values * scale[:, None, :, None], (TILE_R, TILE_C))
    out_at = matrix * rows * columns + r[:, None] * columns + c[None, :]
    tl.store(out_ptr + out_at, product.to(out_ptr.dtype.element_ty), mask=inside)


def _as_3d(x: Tensor) -> Tensor:
    """Return x [..., R, C] as [B, R, C], a view where the leading dimensions allow one."""
    return x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def amax(x: Tensor, m_splits: Tensor | None = None) -> Tensor:
    """Return `reference.amax(x)`, [..., R, C] -> [...], or with m_splits `grouped.grouped_amax`, [R, C] -> [G]."""
    x = x.contiguous()
    groups = 0 if m_splits is None else m_splits.shape[0]
    bits = x.new_zeros((groups,) if m_splits is not None else x.shape[:-2], dtype=torch.int32)
    if x.numel() and bits.numel():
        rows, columns = x.shape[-2:]
        tiles = grouped_tiles(rows, groups, 1, TILE_R) if groups else bits.numel() * triton.cdiv(rows, TILE_R)
        amax_kernel[(tiles * triton.cdiv(columns, TILE_C * AMAX_STEPS),)](
            x,
            bits,
            None if m_splits is None else m_splits.contiguous(),
            rows,
            columns,
            G=groups,
            G_BLOCK=triton.next_power_of_2(max(groups, 1)),
            TILE_R=TILE_R,
            TILE_C=TILE_C,
            STEPS=AMAX_STEPS,
        )
    return bits.view(torch.float32)


def quantize_per_tensor(
    x: Tensor,
    scale: Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    m_splits: Tensor | None = None,
    align: int = 1,
) -> list[Tensor]:
    """Return clamp(x * scale) as FP8, and in x's orientation the same numbers lying transposed in memory, as asked for.

    x: [..., R, C]; scale: float32, broadcastable to x. With m_splits [G]: grouped rows [R, C], scale [G], the second
    copy in rows padded to `align`, as `grouped.quantize_grouped_per_tensor`.
    """
    x = x.contiguous()
    rows, columns = x.shape[-2:]
    groups = 0 if m_splits is None else m_splits.shape[0]
    padded = padded_length(rows, groups, align) if groups else rows
    row = [torch.empty_like(x, dtype=fp8_dtype)] if rowwise else []
    col = [transposed_copy(x, fp8_dtype, padded).empty()] if columnwise else []
    if x.numel() == 0:
        return row + col
    scales = scale if groups else _as_3d(scale.expand(x.shape))
    strides = (scale.stride(0), 0, 0) if groups else scales.stride()
    tile_r = max(TILE_R, align)
    matrices = x.shape[:-2].numel()
    tiles = grouped_tiles(rows, groups, align, tile_r) if groups else matrices * triton.cdiv(rows, tile_r)
    quantize_per_tensor_kernel[(tiles * triton.cdiv(columns, TILE_C),)](
        x,
        scales,
        row[0].view(torch.uint8) if row else None,
        col[0].view(torch.uint8) if col else None,
        None if m_splits is None else m_splits.contiguous(),
        rows,
        padded,
        columns,
        *strides,
        ALIGN=align,
        G=groups,
        G_BLOCK=triton.next_power_of_2(max(groups, 1)),
        SCALE_R=strides[1] != 0 and rows > 1,
        SCALE_C=strides[2] != 0 and columns > 1,
        ROWWISE=rowwise,
        COLUMNWISE=columnwise,
        E4M3=fp8_dtype == torch.float8_e4m3fn,
        NATIVE=native_fp8(x.device),
        TILE_R=tile_r,
        TILE_C=TILE_C,
    )
    return row + col


def dequantize_fp8(data: Tensor, stored: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    """Return data * scale in `dtype`, contiguous. data: [..., R, C] FP8, any strides; stored: float32 or uint8 scales
    of its blocks, or for None a float32 tensor broadcastable to data."""
    out = data.new_empty(data.shape, dtype=dtype)
    if data.numel() == 0:
        return out
    rows, columns = data.shape[-2:]
    values = _as_3d(data.view(torch.uint8))
    scales = _as_3d(stored.expand(data.shape) if block is None else stored)
    br, bc = block or tuple(
        1 if scales.stride(d) and data.shape[d] > 1 else tile for d, tile in ((-2, TILE_R), (-1, TILE_C))
    )
    tile_r, tile_c = max(TILE_R, br), max(TILE_C, bc)
    grid = (values.shape[0] * triton.cdiv(rows, tile_r) * triton.cdiv(columns, tile_c),)
    dequantize_kernel[grid](
        values,
        scales,
        out,
        rows,
        columns,
        *values.stride(),
        *scales.stride(),
        BR=br,
        BC=bc,
        E8M0=stored.dtype == torch.uint8,
        E4M3=data.dtype == torch.float8_e4m3fn,
        TILE_R=tile_r,
        TILE_C=tile_c,
    )
    return out
