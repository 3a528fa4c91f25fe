"""Rotation kernel. A program turns some heads of one token: the angles are loaded once and serve all of them.

T = B*S tokens, N heads, D head channels, R rotated channels, P = R/2 pairs. The products are rounded before they are
added or subtracted, as in the reference, so that results are equal to the last bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["sequence"])
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    sequence,
    table_stride_b,
    stride_b,
    stride_s,
    stride_n,
    N: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token, heads = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch, position = token // sequence, token % sequence
    x_rows = x_ptr + batch * stride_b + position * stride_s + heads.to(tl.int64)[:, None] * stride_n
    y_rows = y_ptr + (token * N + heads[:, None]) * D
    pairs = tl.arange(0, BLOCK_P)
    table = batch * table_stride_b + position * P + pairs
    cos = tl.load(cos_ptr + table, mask=pairs < P, other=0.0)[None, :]
    sin = tl.load(sin_ptr + table, mask=pairs < P, other=0.0)[None, :]
    inside = (heads < N)[:, None] & (pairs < P)[None, :]
    # Interleaved pairs are loaded as the run of memory that they are, then taken apart.
    run = tl.arange(0, 2 * BLOCK_P)[None, :]
    run_inside = (heads < N)[:, None] & (run < 2 * P)
    if INTERLEAVED:
        both = tl.load(x_rows + run, mask=run_inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (BLOCK_N, BLOCK_P, 2)))
    else:
        a = tl.load(x_rows + pairs[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_rows + pairs[None, :] + P, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        turned_a, turned_b = a * cos + b * sin, b * cos - a * sin
    else:
        turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
    Y: tl.constexpr = y_ptr.dtype.element_ty
    if INTERLEAVED:
        both = tl.reshape(tl.join(turned_a, turned_b), (BLOCK_N, 2 * BLOCK_P))
        tl.store(y_rows + run, both.to(Y), mask=run_inside)
    else:
        tl.store(y_rows + pairs[None, :], turned_a.to(Y), mask=inside)
        tl.store(y_rows + pairs[None, :] + P, turned_b.to(Y), mask=inside)
    if 2 * P < D:
        rest = 2 * P + tl.arange(0, BLOCK_REST)[None, :]
        inside = (heads < N)[:, None] & (rest < D)
        tl.store(y_rows + rest, tl.load(x_rows + rest, mask=inside), mask=inside)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate x [B, S, N, D], any strides, by the angles of cos, sin [B or 1, S, P]; inverse: by their negatives."""
    batch, sequence, heads, channels = x.shape
    pairs = cos.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel():
        # Heads beside each other are one run of memory in a projection's output; only the channels must be one here.
        x = x if x.stride(-1) == 1 else x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        block_p = triton.next_power_of_2(max(pairs, 1))
        block_n = min(triton.next_power_of_2(heads), max(1, 4096 // block_p))
        rope_kernel[(batch * sequence, triton.cdiv(heads, block_n))](
            x,
            cos,
            sin,
            y,
            sequence,
            cos.stride(0) if cos.shape[0] > 1 else 0,
            *x.stride()[:3],
            N=heads,
            D=channels,
            P=pairs,
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            BLOCK_N=block_n,
            BLOCK_P=block_p,
            BLOCK_REST=triton.next_power_of_2(max(channels - 2 * pairs, 1)),
            enable_fp_fusion=False,
        )
    return y
