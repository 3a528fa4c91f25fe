"""Scaled GEMM in Triton: `a @ b^T` of FP8 operands with per-tensor, 128-block or MX scales."""

# A kernel takes plain values for its constexpr parameters, and options of the launch; triton's types know neither.
import triton
import triton.language as tl
from torch import Tensor

from .operand import ScaledOperand
from .tile import GROUP_M, PER_TENSOR, TileOperand, accumulate_tile, config, dot_dtype, gemm_tile, swizzled

_PER_TENSOR = tl.constexpr(PER_TENSOR)


@triton.jit(do_not_specialize=["M"])
def scaled_gemm_fwd_kernel(
    a_ptr,
    b_ptr,
    sa_ptr,
    sb_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    a_m,
    a_k,
    b_n,
    b_k,
    sa_m,
    sa_k,
    sb_n,
    sb_k,
    o_m,
    o_n,
    MODE: tl.constexpr,
    ROWS_A: tl.constexpr,
    ROWS_B: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile per program."""
    m, n = swizzled(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = rows < M, columns < N
    # fmt: off
    acc = gemm_tile(
        a_ptr, b_ptr, sa_ptr, sb_ptr, rows, columns, mask_m, mask_n, K,
        a_m, a_k, b_n, b_k, sa_m, sa_k, sb_n, sb_k,
        MODE, ROWS_A, ROWS_B, SPLIT, DOT, BLOCK_M, BLOCK_N, BLOCK_K,
    )
    # fmt: on
    if MODE == _PER_TENSOR:
        acc *= tl.load(sa_ptr) * tl.load(sb_ptr)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    accumulate_tile(acc, out_ptr, rows, columns, mask_m[:, None] & mask_n[None, :], o_m, o_n, ACCUMULATE)


def scaled_gemm(
    left: ScaledOperand,
    right: ScaledOperand,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    split_accumulation: bool = True,
    accumulate: bool = False,
) -> Tensor:
    """Write `left @ right^T + bias` into out [M, N], or add it there, and return it."""
    a, b, (rows, columns) = TileOperand.of(left), TileOperand.of(right), out.shape
    split = split_accumulation and a.mode == PER_TENSOR
    tiles = config(a, rows, columns, narrow=split or accumulate)
    grid = (triton.cdiv(rows, tiles.BLOCK_M) * triton.cdiv(columns, tiles.BLOCK_N),)
    # fmt: off
    scaled_gemm_fwd_kernel[grid](
        a.data, b.data, a.scales, b.scales, bias, out, rows, columns, left.inner,
        *a.strides[1:], *b.strides[1:], *a.scale_strides[1:], *b.scale_strides[1:], *out.stride(),
        MODE=a.mode, ROWS_A=a.rows, ROWS_B=b.rows, SPLIT=split,
        DOT=dot_dtype(a), ACCUMULATE=accumulate, GROUP_M=GROUP_M, **tiles._asdict(),
    )
    # fmt: on
    return out


_BLOCK = 128


@triton.jit
def copy_transposed_kernel(x_ptr, out_ptr, R, C, x_b, x_r, x_c, o_b, o_r, o_c, BLOCK: tl.constexpr):
    """One BLOCK x BLOCK tile per program: loads along x's contiguous dimension, stores along out's."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    member = tl.program_id(2).to(tl.int64)
    mask = (r < R)[:, None] & (c < C)[None, :]
    values = tl.load(x_ptr + member * x_b + r[:, None] * x_r + c[None, :] * x_c, mask=mask)
    tl.store(out_ptr + member * o_b + r[:, None] * o_r + c[None, :] * o_c, values, mask=mask)


def copy_transposed(x: Tensor, out: Tensor) -> Tensor:
    """Copy x [R, C] or [G, R, C] into out, whose other dimension is contiguous."""
    if x.numel() == 0:
        return out
    if x.dim() == 2:
        copy_transposed(x[None], out[None])
        return out
    members, rows, columns = x.shape
    grid = (triton.cdiv(rows, _BLOCK), triton.cdiv(columns, _BLOCK), members)
    copy_transposed_kernel[grid](x, out, rows, columns, *x.stride(), *out.stride(), BLOCK=_BLOCK, num_warps=8)
    return out
