"""The inner loop that every scaled GEMM kernel shares: one BLOCK_M x BLOCK_N tile of `a @ b^T`, summed over K.

How scales enter (MODE): NONE and PER_TENSOR leave them to the epilogue. BLOCK_128 multiplies the product of each
128-long K block by both sides' scales and adds it to a float32 accumulator (split accumulation). MICRO multiplies the
values by their power of two first (exact in bfloat16), so it runs where there are no block-scaled tensor cores.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..launch import shared_memory
from .operand import ScaledOperand, k_contiguous

NONE, PER_TENSOR, BLOCK_128, MICRO = 0, 1, 2, 3
_MODES = {"per_tensor": PER_TENSOR, "float32": BLOCK_128, "pow2": BLOCK_128, "e8m0": MICRO}
_BLOCK_128, _MICRO = tl.constexpr(BLOCK_128), tl.constexpr(MICRO)
GROUP_M = 8
_WIDE_MEMORY = 160 * 1024  # bytes of shared memory that a wide tile's values in flight take at least


class TileOperand(NamedTuple):
    """Kernel arguments of one operand. strides: (member, outer, K) of data and of scales; rows: a block's."""

    data: Tensor
    scales: Tensor | None
    strides: tuple[int, int, int]
    scale_strides: tuple[int, int, int]
    mode: int
    rows: int

    @staticmethod
    def of(operand: ScaledOperand) -> TileOperand:
        """Describe a quantized operand [outer, K] or [G, outer, K]; a copy where tensor cores could not read it."""
        mode = _MODES[operand.kind]
        # MX values are converted to bfloat16, because tensor cores read it either way
        data = operand.data if mode == MICRO else k_contiguous(operand.data)
        rows = 1 if operand.block is None else operand.block[0]
        if operand.block is None:
            scale = operand.scale_inv
            scale_strides = (scale.stride(0) if scale.dim() else 0, 0, 0)
        else:
            scale_strides = _strides(operand.scale_inv)
        return TileOperand(data, operand.scale_inv, _strides(data), scale_strides, mode, rows)

    @staticmethod
    def unscaled(data: Tensor) -> TileOperand:
        """Describe unquantized values."""
        return TileOperand(data, None, _strides(data), (0, 0, 0), NONE, 1)


def _strides(x: Tensor) -> tuple[int, int, int]:
    return (x.stride(0) if x.dim() == 3 else 0, x.stride(-2), x.stride(-1))


def dot_dtype(left: TileOperand) -> tl.dtype | None:
    """Return the dtype to convert values to before the dot; None where they are multiplied as they are.

    Triton's interpreter multiplies bfloat16 bit patterns as integers, so there it gets float32.
    """
    if not left.data.is_cuda:
        return tl.float32
    return tl.bfloat16 if left.mode == MICRO else None


@triton.jit
def swizzled(t, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (row tile, column tile) number t: GROUP_M row tiles share their columns' operand in L2."""
    group = t // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = t % (GROUP_M * tiles_n)
    return group * GROUP_M + within % height, within // height


@triton.jit
def scale_from_e8m0(byte):
    """2^(byte - 127) in float32: byte 0 is the subnormal 2^-127, 255 is NaN."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def descaled(values, scale_ptr, rows, mask, k0, K, s_m, s_k, ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """values [R, C] times the power of two of their 32-long blocks, float32."""
    block = k0 // 32 + tl.arange(0, C // 32)
    inside = mask[:, None] & (block < tl.cdiv(K, 32))[None, :]
    byte = tl.load(scale_ptr + (rows // ROWS)[:, None] * s_m + block.to(tl.int64)[None, :] * s_k, mask=inside, other=0)
    values = tl.reshape(values.to(tl.float32), (R, C // 32, 32)) * scale_from_e8m0(byte)[:, :, None]
    return tl.reshape(values, (R, C))


@triton.jit
def gemm_tile(
    a_ptr,
    b_ptr,
    sa_ptr,
    sb_ptr,
    rows_a,
    rows_b,
    mask_a,
    mask_b,
    K,
    a_m,
    a_k,
    b_n,
    b_k,
    sa_m,
    sa_k,
    sb_n,
    sb_k,
    MODE: tl.constexpr,
    ROWS_A: tl.constexpr,
    ROWS_B: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return float32 [BLOCK_M, BLOCK_N]. rows_a, rows_b: the tile's int64 row numbers. 128-blocks take BLOCK_K 128."""
    columns = tl.arange(0, BLOCK_K)
    a_at = a_ptr + rows_a[:, None] * a_m + columns.to(tl.int64)[None, :] * a_k
    b_at = b_ptr + rows_b[:, None] * b_n + columns.to(tl.int64)[None, :] * b_k
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # at least one round, of nothing but masks: a loop that may run zero times makes the tensor cores work one at a time
    for k0 in range(0, tl.maximum(K, 1), BLOCK_K):
        inside = (columns < K - k0)[None, :]
        a = tl.load(a_at, mask=mask_a[:, None] & inside, other=0.0)
        b = tl.load(b_at, mask=mask_b[:, None] & inside, other=0.0)
        if MODE == _MICRO:
            a = descaled(a, sa_ptr, rows_a, mask_a, k0, K, sa_m, sa_k, ROWS_A, BLOCK_M, BLOCK_K)
            b = descaled(b, sb_ptr, rows_b, mask_b, k0, K, sb_n, sb_k, ROWS_B, BLOCK_N, BLOCK_K)
        if DOT is not None:
            a = a.to(DOT)
            b = b.to(DOT)
        if MODE == _BLOCK_128:
            sa = tl.load(sa_ptr + (rows_a // ROWS_A) * sa_m, mask=mask_a & (k0 < K), other=0.0)
            product = tl.dot(a, tl.trans(b))
            if ROWS_B % BLOCK_N == 0:
                # one scale for all of the tile's columns: one multiplication per element less
                sb = tl.load(sb_ptr + (tl.min(rows_b, 0) // ROWS_B) * sb_n, mask=k0 < K, other=0.0)
                acc += product * (sa * sb)[:, None]
            else:
                sb = tl.load(sb_ptr + (rows_b // ROWS_B) * sb_n, mask=mask_b & (k0 < K), other=0.0)
                acc += product * (sa[:, None] * sb[None, :])
            sa_ptr += sa_k
            sb_ptr += sb_k
        elif SPLIT:
            acc = tl.dot(a, tl.trans(b), acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    return acc


@triton.jit
def accumulate_tile(acc, out_ptr, rows, columns, mask, o_m, o_n, ACCUMULATE: tl.constexpr):
    """Write a tile, or add it to what is there: summed in float32, rounded once to the output's dtype."""
    at = out_ptr + rows[:, None] * o_m + columns[None, :] * o_n
    if ACCUMULATE:
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=mask)


class Config(NamedTuple):
    """Tile sizes and launch options."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


def config(left: TileOperand, rows: int, columns: int, *, narrow: bool) -> Config:
    """Choose tiles for about `rows` x `columns` per GEMM: fixed by the shapes, so that two runs agree to the last bit.

    A wide tile reads less of `a` per product. narrow: not a wide one, because the kernel needs its registers for a
    second accumulator (split sums, 128-blocks) or for what it adds to; it would spill (test_hopper.py compiles all).
    Nor is a tile wide on consumers' GPUs and compute capability 8.9, whose 99 KiB of shared memory hold a narrow one.
    """
    if not left.data.is_cuda:
        # the interpreter: small tiles, so that small tests have many, ragged ones among them
        return Config(16, 16, 32 if left.mode == NONE else 128, 1, 1)
    if left.mode == NONE:
        block_k, stages = (64, 4) if left.data.element_size() == 2 else (32, 3)
    else:
        # MX values become bfloat16 in registers, and 128 of them per row would overflow these
        block_k, stages = 64 if left.mode == MICRO else 128, 4
    if rows <= 16:
        return Config(16, 128, block_k, 4, stages)
    if rows <= 64:
        return Config(64, 128, block_k, 4, stages)
    half = left.mode == NONE and left.data.element_size() == 2
    wide = columns >= 256 and not narrow and (half or left.mode == PER_TENSOR)
    wide = wide and shared_memory(left.data.device) >= _WIDE_MEMORY
    return Config(128, 256 if wide else 128, block_k, 8, stages)
