"""Grouped GEMM in Triton: one launch over all groups, whose row ranges are read on the device.

T rows sorted by group, G groups, [N, K] matrices. Splits that add up to more than T rows are cut off at T.
"""

# A kernel takes plain values for its constexpr parameters, and options of the launch; triton's types know neither.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..gemm.tile import BLOCK_128, GROUP_M, MICRO, NONE, PER_TENSOR, Side, config, dot_dtype, store_tile, swizzled, tile
from ..launch import multiprocessors

_PER_TENSOR = tl.constexpr(PER_TENSOR)
_ROW_BLOCK = {NONE: 1, PER_TENSOR: 16, BLOCK_128: 128, MICRO: 32}


# fmt: off
@triton.jit(do_not_specialize=["T", "G", "PROGRAMS"])
def grouped_gemm_fwd_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, splits_ptr, out_ptr, T, N, K, G, PROGRAMS,
    a_m, a_k, b_g, b_n, b_k, sa_g, sa_m, sa_k, sb_g, sb_n, sb_k, o_m, o_n,
    MODE: tl.constexpr, ROWS_B: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out[rows of g] = a[rows of g] @ b[g]^T, zero past the last group.

    Tiles are numbered through all groups; each program walks the groups and takes every PROGRAMS-th tile.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    t = tl.program_id(0)
    first = 0
    begin = 0
    for g in range(G):
        end = tl.minimum(begin + tl.maximum(tl.load(splits_ptr + g).to(tl.int32), 0), T)
        tiles_m = tl.cdiv(end - begin, BLOCK_M)
        while t < first + tiles_m * tiles_n:
            m, n = swizzled(t - first, tiles_m, tiles_n, GROUP_M)
            rows = begin + m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_m, mask_n = rows < end, columns < N
            acc = tile(
                a_ptr, b_ptr, sa_ptr, sb_ptr, rows, columns, mask_m, mask_n, K,
                a_m, a_k, b_n, b_k, sa_m, sa_k, sb_n, sb_k,
                MODE, 1, ROWS_B, SPLIT, DOT, BLOCK_M, BLOCK_N, BLOCK_K,
            )
            if MODE == _PER_TENSOR:
                acc *= tl.load(sa_ptr) * tl.load(sb_ptr)
            store_tile(acc, out_ptr, rows, columns, mask_m[:, None] & mask_n[None, :], o_m, o_n, False)
            t += PROGRAMS
        first += tiles_m * tiles_n
        begin = end
        # steps rather than multiples of g: those could need more than 32 bits
        b_ptr += b_g
        if MODE == _PER_TENSOR:
            sa_ptr += sa_g
        if sb_ptr is not None:
            sb_ptr += sb_g
    tiles_m = tl.cdiv(T - begin, BLOCK_M)
    while t < first + tiles_m * tiles_n:
        m, n = swizzled(t - first, tiles_m, tiles_n, GROUP_M)
        rows = begin + m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < T)[:, None] & (columns < N)[None, :]
        store_tile(tl.zeros([BLOCK_M, BLOCK_N], tl.float32), out_ptr, rows, columns, mask, o_m, o_n, False)
        t += PROGRAMS


@triton.jit(do_not_specialize=["T", "G"])
def grouped_gemm_wgrad_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, factor_ptr, splits_ptr, out_ptr, T, N, K, G,
    a_n, a_t, b_k, b_t, sa_g, sa_n, sa_t, sb_g, sb_k, sb_t, o_g, o_n, o_k,
    MODE: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr, ACCUMULATE: tl.constexpr, GROUP_M: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out[g] (+)= factor[g] * a[:, rows of g] @ b[:, rows of g]^T, for a [N, T] and b [K, T]; one tile per program."""
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N)
    g = tl.program_id(0) // (tiles_n * tiles_k)
    m, n = swizzled(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, GROUP_M)
    rows = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = rows < N, columns < K
    begin = 0
    for i in range(g):
        begin += tl.maximum(tl.load(splits_ptr + i).to(tl.int32), 0)
    # rounding changes nothing for splits that are multiples, and tells the compiler that it may read 16 bytes at once
    begin = tl.minimum(begin, T) // ROW_BLOCK * ROW_BLOCK
    size = tl.minimum(tl.maximum(tl.load(splits_ptr + g).to(tl.int32), 0), T - begin) // ROW_BLOCK * ROW_BLOCK
    begin = begin.to(tl.int64)
    if MODE != _PER_TENSOR and sa_ptr is not None:
        sa_ptr += begin // ROW_BLOCK * sa_t
        sb_ptr += begin // ROW_BLOCK * sb_t
    acc = tile(
        a_ptr + begin * a_t, b_ptr + begin * b_t, sa_ptr, sb_ptr, rows, columns, mask_m, mask_n, size,
        a_n, a_t, b_k, b_t, sa_n, sa_t, sb_k, sb_t,
        MODE, 1, 1, SPLIT, DOT, BLOCK_M, BLOCK_N, BLOCK_K,
    )
    if MODE == _PER_TENSOR:
        acc *= tl.load(sa_ptr + g * sa_g) * tl.load(sb_ptr + g * sb_g)
    if factor_ptr is not None:
        acc *= tl.load(factor_ptr + g)
    mask = mask_m[:, None] & mask_n[None, :]
    if ACCUMULATE:
        # by mask: a branch around the loop would make the tensor cores wait for every product
        mask = mask & (size > 0)
    store_tile(acc, out_ptr + g.to(tl.int64) * o_g, rows, columns, mask, o_n, o_k, ACCUMULATE)
# fmt: on


def grouped_gemm(a: Side, b: Side, m_splits: Tensor, out: Tensor, *, split_accumulation: bool = True) -> Tensor:
    """Write each row's product with its group's matrix into out [T, N]; a: rows [T, K]; b: [G, N, K]."""
    rows, columns = out.shape
    if out.numel() == 0:
        return out
    groups = m_splits.shape[0]
    split = split_accumulation and a.mode == PER_TENSOR
    tiles = config(a, triton.cdiv(rows, max(groups, 1)), columns, narrow=split)
    most = (triton.cdiv(rows, tiles.BLOCK_M) + groups) * triton.cdiv(columns, tiles.BLOCK_N)
    programs = min(most, multiprocessors(out.device))
    # fmt: off
    grouped_gemm_fwd_kernel[(programs,)](
        a.data, b.data, a.scales, b.scales, m_splits.contiguous(), out, rows, columns, a.data.shape[-1], groups,
        programs, *a.strides[1:], *b.strides, *a.scale_strides, *b.scale_strides, *out.stride(),
        MODE=a.mode, ROWS_B=b.rows, SPLIT=split, DOT=dot_dtype(a),
        GROUP_M=GROUP_M, **tiles._asdict(),
    )
    # fmt: on
    return out


def grouped_gemm_wgrad(
    a: Side, b: Side, m_splits: Tensor, out: Tensor, *, factor: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """Write each group's `factor[g] * a @ b^T` over its rows into out [G, N, K], or add it there; a: [N, T]; b: [K, T].

    FP8 copies are contiguous and scaled along the rows: every split is then a multiple of 16 (per tensor), 32 (MX) or
    128 (128-blocks) rows.
    """
    if out.numel() == 0:
        return out
    groups, rows, columns = out.shape
    total = a.data.shape[-1]
    tiles = config(a, rows, columns, narrow=accumulate or a.mode == PER_TENSOR)
    grid = (groups * triton.cdiv(rows, tiles.BLOCK_M) * triton.cdiv(columns, tiles.BLOCK_N),)
    # fmt: off
    grouped_gemm_wgrad_kernel[grid](
        a.data, b.data, a.scales, b.scales, factor, m_splits.contiguous(), out, total, rows, columns, groups,
        *a.strides[1:], *b.strides[1:], *a.scale_strides, *b.scale_strides, *out.stride(),
        MODE=a.mode, SPLIT=a.mode == PER_TENSOR, DOT=dot_dtype(a), ACCUMULATE=accumulate, GROUP_M=GROUP_M,
        ROW_BLOCK=_ROW_BLOCK[a.mode], **tiles._asdict(),
    )
    # fmt: on
    return out
