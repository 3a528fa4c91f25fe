"""NVFP4 back to numbers."""

# A kernel takes plain values for the constexpr parameters that choose its branches; triton's types know neither.
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_rounding import from_e2m1, from_e4m3, nvfp4_global_encode, reciprocal

TILE_R, TILE_C = 32, 128


@triton.jit
def dequantize_nvfp4_kernel(
    packed_ptr,
    scale_ptr,
    amax_ptr,
    out_ptr,
    rows,
    columns,
    amax_stride_m,
    amax_stride_r,
    GLOBAL: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """One tile of out [B, R, C]; GLOBAL: times the factor of the matrix, or of the row (amax_stride_r)."""
    program = tl.program_id(0).to(tl.int64)
    column_tiles, row_tiles = tl.cdiv(columns, TILE_C), tl.cdiv(rows, TILE_R)
    first_column = program % column_tiles * TILE_C
    first_row = program // column_tiles % row_tiles * TILE_R
    matrix = program // column_tiles // row_tiles
    r = first_row + tl.arange(0, TILE_R)
    row = matrix * rows + r
    has_row = (r < rows)[:, None]
    byte = first_column // 2 + tl.arange(0, TILE_C // 2)
    width = tl.cdiv(columns, 2)
    has_byte = has_row & (byte < width)[None, :]
    packed = tl.load(packed_ptr + row[:, None] * width + byte[None, :], mask=has_byte, other=0).to(tl.int32)
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), (TILE_R, TILE_C))
    block = first_column // 16 + tl.arange(0, TILE_C // 16)
    blocks = tl.cdiv(columns, 16)
    scales = tl.load(
        scale_ptr + row[:, None] * blocks + block[None, :], mask=has_row & (block < blocks)[None, :], other=0
    )
    values = tl.reshape(from_e2m1(codes), (TILE_R, TILE_C // 16, 16)) * from_e4m3(scales.to(tl.int32))[:, :, None]
    values = tl.reshape(values, (TILE_R, TILE_C))
    if GLOBAL:
        amax = tl.load(amax_ptr + matrix * amax_stride_m + r * amax_stride_r, mask=r < rows, other=0.0)
        values = values * reciprocal(nvfp4_global_encode(amax))[:, None]
    c = first_column + tl.arange(0, TILE_C)
    out_at = row[:, None] * columns + c[None, :]
    tl.store(out_ptr + out_at, values.to(out_ptr.dtype.element_ty), mask=has_row & (c < columns)[None, :])


def dequantize_nvfp4(packed: Tensor, scales: Tensor, amax: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """Return `nvfp4.dequantize_nvfp4`, or without amax `nvfp4.decode_blocks` in `dtype`: [..., R, columns]."""
    *batch, rows, _ = packed.shape
    out = packed.new_empty((*batch, rows, columns), dtype=dtype)
    if out.numel() == 0:
        return out
    matrices = packed.shape[:-2].numel()
    if amax is not None:
        per_row = amax if amax.dim() == packed.dim() else amax[..., None, None]
        amax = per_row.expand(*batch, rows, 1).reshape(matrices, rows)
    grid = (matrices * triton.cdiv(rows, TILE_R) * triton.cdiv(columns, TILE_C),)
    dequantize_nvfp4_kernel[grid](
        packed.contiguous(),
        scales.contiguous().view(torch.uint8),
        amax,
        out,
        rows,
        columns,
        *((0, 0) if amax is None else amax.stride()),
        GLOBAL=amax is not None,
        TILE_R=TILE_R,
        TILE_C=TILE_C,
    )
    return out
