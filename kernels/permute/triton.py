"""Permutation kernels. One program moves one token, so each token is read once however many experts it has.

T tokens, K experts per token, E experts, H hidden, R rows, P padding rows. Every row is written by the one program that
owns it (a token's, or one that fills a padding row), so nothing needs an atomic operation or a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["tokens"])
def permute_kernel(
    x_ptr, row_of_slot_ptr, padding_ptr, y_ptr, tokens, H: tl.constexpr, K: tl.constexpr, B: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    if program < tokens:
        for begin in range(0, H, B):
            columns = begin + tl.arange(0, B)
            x = tl.load(x_ptr + program * H + columns, mask=columns < H)
            for k in tl.static_range(K):
                row = tl.load(row_of_slot_ptr + program * K + k)
                tl.store(y_ptr + row * H + columns, x, mask=columns < H)
    elif padding_ptr is not None:
        fill_with_zeros(y_ptr, tl.load(padding_ptr + program - tokens), H, B)


@triton.jit
def fill_with_zeros(y_ptr, row, H: tl.constexpr, B: tl.constexpr):
    for begin in range(0, H, B):
        columns = begin + tl.arange(0, B)
        tl.store(y_ptr + row * H + columns, tl.zeros([B], y_ptr.dtype.element_ty), mask=columns < H)


@triton.jit
def sum_slots_kernel(y_ptr, row_of_slot_ptr, weight_ptr, out_ptr, H: tl.constexpr, K: tl.constexpr, B: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for begin in range(0, H, B):
        columns = begin + tl.arange(0, B)
        for k in tl.static_range(K):
            row = tl.load(row_of_slot_ptr + token * K + k)
            term = tl.load(y_ptr + row * H + columns, mask=columns < H, other=0.0).to(tl.float32)
            if weight_ptr is not None:
                term *= tl.load(weight_ptr + token * K + k).to(tl.float32)
            # The first term as it is: adding it to zero would lose the sign of a negative zero.
            total = term if k == 0 else total + term  # noqa: F821
        tl.store(out_ptr + token * H + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit(do_not_specialize=["tokens"])
def unpermute_bwd_kernel(
    grad_ptr,
    y_ptr,
    weight_ptr,
    row_of_slot_ptr,
    padding_ptr,
    dy_ptr,
    d_weight_ptr,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if program < tokens:
        k = tl.arange(0, BLOCK_K)
        rows = tl.load(row_of_slot_ptr + program * K + k, mask=k < K, other=0)
        weights = tl.load(weight_ptr + program * K + k, mask=k < K, other=0.0).to(tl.float32)
        products = tl.zeros([BLOCK_K], tl.float32)
        for begin in range(0, H, B):
            columns = begin + tl.arange(0, B)
            grad = tl.load(grad_ptr + program * H + columns, mask=columns < H, other=0.0).to(tl.float32)
            inside = (k < K)[:, None] & (columns < H)[None, :]
            at = rows[:, None] * H + columns[None, :]
            if d_weight_ptr is not None:
                y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
                products += tl.sum(y * grad[None, :], axis=1)
            dy = grad[None, :] * weights[:, None]
            tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty), mask=inside)
        if d_weight_ptr is not None:
            tl.store(d_weight_ptr + program * K + k, products, mask=k < K)
    elif padding_ptr is not None:
        fill_with_zeros(dy_ptr, tl.load(padding_ptr + program - tokens), H, B)


def _block(columns: int, most: int) -> int:
    return min(most, triton.next_power_of_2(max(columns, 1)))


def permute_rows(x: Tensor, row_of_slot: Tensor, padding_rows: Tensor | None) -> Tensor:
    """Copy each token to its K rows, and zeros to the padding rows: [T, H] of any dtype -> [R, H]."""
    (tokens, topk), columns = row_of_slot.shape, x.shape[1]
    padding = 0 if padding_rows is None else padding_rows.shape[0]
    y = x.new_empty(tokens * topk + padding, columns)
    if y.numel():
        # Bytes are bytes: the kernel is compiled for the sizes of elements only.
        as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        permute_kernel[(tokens + padding,)](
            x.contiguous().view(as_bits),
            row_of_slot,
            padding_rows,
            y.view(as_bits),
            tokens,
            H=columns,
            K=topk,
            B=_block(columns, 2048),
        )
    return y


def sum_slots(y: Tensor, row_of_slot: Tensor, weights: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Sum each token's K rows in float32, k = 0 first, times weights [T, K] if given: [R, H] -> [T, H] in `dtype`
    (None: y's)."""
    (tokens, topk), columns = row_of_slot.shape, y.shape[1]
    out = y.new_empty(tokens, columns, dtype=dtype)
    if out.numel():
        sum_slots_kernel[(tokens,)](
            y.contiguous(),
            row_of_slot,
            None if weights is None else weights.contiguous(),
            out,
            H=columns,
            K=topk,
            B=_block(columns, 2048),
            enable_fp_fusion=False,  # the product is rounded before it is added, as in the reference
        )
    return out


def unpermute_bwd(
    grad: Tensor, y: Tensor, weights: Tensor, row_of_slot: Tensor, padding_rows: Tensor | None, needs_weights: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `sum_slots` in y [R, H] and in weights ([T, K] float32, empty unless asked for)."""
    (tokens, topk), columns = row_of_slot.shape, y.shape[1]
    padding = 0 if padding_rows is None else padding_rows.shape[0]
    dy = torch.empty_like(y, memory_format=torch.contiguous_format)
    d_weights = grad.new_zeros(weights.shape if needs_weights else 0, dtype=torch.float32)
    if y.numel():
        block_k = triton.next_power_of_2(topk)
        unpermute_bwd_kernel[(tokens + padding,)](
            grad.contiguous(),
            y.contiguous(),
            weights.contiguous(),
            row_of_slot,
            padding_rows,
            dy,
            d_weights if needs_weights else None,
            tokens,
            H=columns,
            K=topk,
            BLOCK_K=block_k,
            B=_block(columns, max(128, 4096 // block_k)),
        )
    return dy, d_weights
