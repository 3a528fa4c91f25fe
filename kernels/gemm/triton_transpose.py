"""A copy between a matrix and its transpose, of bytes."""

# A kernel takes plain values for its constexpr parameters, and options of the launch; triton's types know neither.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
