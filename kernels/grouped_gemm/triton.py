"""Grouped GEMM in Triton: one launch over all groups, whose row ranges are read on the device.

T rows sorted by group, G groups, [N, K] matrices. Splits that add up to more than T rows are cut off at T.
"""

# A kernel takes plain values for its constexpr parameters, and options of the launch; triton's types know neither.
import triton
import triton.language as tl
from torch import Tensor

from ..gemm.tile import (
    BLOCK_128,
    GROUP_M,
    MICRO,
    NONE,
    PER_TENSOR,
    TileOperand,
    accumulate_tile,
    config,
    dot_dtype,
    gemm_tile,
    swizzled,
)
from ..launch import multiprocessors

_PER_TENSOR = tl.constexpr(PER_TENSOR)
_ROW_BLOCK = {NONE: 1, PER_TENSOR: 16, BLOCK_128: 128, MICRO: 32}


# fmt: off
@triton.jit
def group_sizes(splits_ptr, groups, G):
    """Return the rows of groups numbered by a vector, int64; 0 from G on, and for a negative entry."""
    return tl.maximum(tl.load(splits_ptr + groups, mask=groups < G, other=0).to(tl.int64), 0)


@triton.jit(do_not_specialize=["T", "G", "PROGRAMS"])
def grouped_gemm_fwd_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, splits_ptr, out_ptr, T, N, K, G, PROGRAMS,
    a_m, a_k, b_g, b_n, b_k, sa_g, sa_m, sa_k, sb_g, sb_n, sb_k, o_m, o_n,
    MODE: tl.constexpr, ROWS_B: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr, GROUP_M: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out[rows of g] = a[rows of g] @ b[g]^T, zero past the last group.

    Tiles are numbered through all groups and then through the rows past them, as if those were group G, whose K is 0;
    each program takes every PROGRAMS-th tile. GROUPS: a power of two above G.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    groups = tl.arange(0, GROUPS)
    sizes = tl.where(groups == G, T, group_sizes(splits_ptr, groups, G))
    # what is kept through the tiles is two numbers per group; all else is derived, for registers are short
    ends = tl.minimum(tl.cumsum(sizes, 0), T).to(tl.int32)
    begins = tl.minimum(tl.cumsum(sizes, 0) - sizes, T).to(tl.int32)
    tile_ends = tl.cumsum(tl.cdiv(ends - begins, BLOCK_M), 0) * tiles_n
    for t in range(tl.program_id(0), tl.max(tile_ends, 0), PROGRAMS):
        before = tile_ends <= t
        g = tl.sum(before.to(tl.int32), 0)
        first = tl.max(tl.where(before, tile_ends, 0), 0)
        begin = tl.max(tl.where(before, ends, 0), 0)
        end = tl.max(tl.where(groups <= g, ends, 0), 0)
        m, n = swizzled(t - first, tl.cdiv(end - begin, BLOCK_M), tiles_n, GROUP_M)
        rows = begin + m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_m, mask_n = rows < end, columns < N
        member = g.to(tl.int64)
        sb_of_group = sb_ptr
        if sb_ptr is not None:
            sb_of_group = sb_ptr + member * sb_g
        acc = gemm_tile(
            a_ptr, b_ptr + member * b_g, sa_ptr, sb_of_group, rows, columns, mask_m, mask_n, tl.where(g < G, K, 0),
            a_m, a_k, b_n, b_k, sa_m, sa_k, sb_n, sb_k,
            MODE, 1, ROWS_B, SPLIT, DOT, BLOCK_M, BLOCK_N, BLOCK_K,
        )
        if MODE == _PER_TENSOR:
            acc *= tl.load(sa_ptr + member * sa_g, mask=g < G, other=0.0)
            acc *= tl.load(sb_of_group, mask=g < G, other=0.0)
        accumulate_tile(acc, out_ptr, rows, columns, mask_m[:, None] & mask_n[None, :], o_m, o_n, False)


@triton.jit(do_not_specialize=["T", "G"])
def grouped_gemm_wgrad_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, factor_ptr, ends_ptr, out_ptr, T, N, K, G,
    a_n, a_t, b_k, b_t, sa_g, sa_n, sa_t, sb_g, sb_k, sb_t, o_g, o_n, o_k,
    MODE: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr, ACCUMULATE: tl.constexpr, GROUP_M: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out[g] (+)= factor[g] * a[:, rows of g] @ b[:, rows of g]^T, for a [N, T] and b [K, T]; one tile per program.

    ends: running sum of the splits. A sum computed here would not be in uniform registers, nor would the pointers that
    it moves, and accumulators would be spilled.
    """
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N)
    g = tl.program_id(0) // (tiles_n * tiles_k)
    m, n = swizzled(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, GROUP_M)
    rows = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = rows < N, columns < K
    begin = tl.minimum(tl.maximum(tl.load(ends_ptr + g - 1, mask=g > 0, other=0), 0), T).to(tl.int32)
    end = tl.minimum(tl.maximum(tl.load(ends_ptr + g), 0), T).to(tl.int32)
    # rounding changes nothing for splits that are multiples, and tells the compiler that it may read 16 bytes at once
    begin = begin // ROW_BLOCK * ROW_BLOCK
    size = tl.maximum(end - begin, 0) // ROW_BLOCK * ROW_BLOCK
    begin = begin.to(tl.int64)
    if MODE != _PER_TENSOR and sa_ptr is not None:
        sa_ptr += begin // ROW_BLOCK * sa_t
        sb_ptr += begin // ROW_BLOCK * sb_t
    acc = gemm_tile(
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
    accumulate_tile(acc, out_ptr + g.to(tl.int64) * o_g, rows, columns, mask, o_n, o_k, ACCUMULATE)
# fmt: on


def grouped_gemm(
    a: TileOperand, b: TileOperand, m_splits: Tensor, out: Tensor, *, split_accumulation: bool = True
) -> Tensor:
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
        GROUP_M=GROUP_M, GROUPS=triton.next_power_of_2(groups + 1), **tiles._asdict(),
    )
    # fmt: on
    return out


def grouped_gemm_wgrad(
    a: TileOperand,
    b: TileOperand,
    m_splits: Tensor,
    out: Tensor,
    *,
    factor: Tensor | None = None,
    accumulate: bool = False,
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
        a.data, b.data, a.scales, b.scales, factor, m_splits.cumsum(0), out, total, rows, columns, groups,
        *a.strides[1:], *b.strides[1:], *a.scale_strides, *b.scale_strides, *out.stride(),
        MODE=a.mode, SPLIT=a.mode == PER_TENSOR, DOT=dot_dtype(a), ACCUMULATE=accumulate, GROUP_M=GROUP_M,
        ROW_BLOCK=_ROW_BLOCK[a.mode], **tiles._asdict(),
    )
    # fmt: on
    return out
