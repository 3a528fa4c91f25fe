"""Public permute and unpermute with written gradients; autograd would derive scatter-adds.

On CPU the reference runs, eager or fused by Inductor; on an accelerator four registered kernels.
"""

import torch
from torch import Tensor

from ..backend import definitions_only
from ..cpu_rows import sum_slots as sum_rows
from ..custom_op import FLOATS, INTEGERS, Output, absent, like, operation, takes
from ..torch_versions import own_result
from . import reference
from .reference import Permutation, row_count


def _permutation(indices: Tensor, num_experts: int, align: int) -> tuple[Output, ...]:
    slots = indices.numel()
    rows = row_count(slots, num_experts, align)
    shapes = ((rows,), indices.shape, (num_experts,), (num_experts,), (rows - slots,))
    return tuple(like(indices, shape, torch.int64) for shape in shapes)


_INDICES = takes(f"indices: {INTEGERS} [S, K]")


@operation("sort_by_expert", _permutation, takes=_INDICES)
def sort_by_expert_op(indices: Tensor, num_experts: int, align: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Permutation` for indices [T, K] integer; no padding rows is an empty tensor."""
    from . import triton_sort

    return triton_sort.sort_by_expert(indices, num_experts, align)


def _rows(x: Tensor, row_of_slot: Tensor, padding_rows: Tensor | None) -> Output:
    padding = 0 if padding_rows is None else padding_rows.shape[0]
    return like(x, (row_of_slot.shape[0] * row_of_slot.shape[1] + padding, x.shape[1]))


_ROWS = takes("x: any [S, H]; row_of_slot: int64 [S, K]; padding_rows: int64 [_]?")


@operation("permute_rows", _rows, takes=_ROWS)
def permute_rows(x: Tensor, row_of_slot: Tensor, padding_rows: Tensor | None) -> Tensor:
    """Copy each token to its K rows, zeros to the padding rows: [T, H] of any dtype -> [R, H]."""
    from . import triton

    return triton.permute_rows(x, row_of_slot, padding_rows)


_SLOTS = takes(f"y: {FLOATS} [R, H]; row_of_slot: int64 [S, K]; weights: {FLOATS} [S, K]?; K > 0")


@operation("sum_slots", lambda y, row_of_slot, dtype: like(y, (row_of_slot.shape[0], y.shape[1]), dtype), takes=_SLOTS)
def sum_slots(y: Tensor, row_of_slot: Tensor, weights: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Sum each token's K rows in float32, k = 0 first, times weights [T, K] if given: [R, H] -> [T, H] in `dtype`
    (None: y's)."""
    from . import triton

    return triton.sum_slots(y, row_of_slot, weights, dtype)


def _gradients(y: Tensor, weights: Tensor, needs_weights: bool) -> tuple[Output, Output]:
    return like(y), like(weights, dtype=torch.float32) if needs_weights else absent(y, torch.float32)


_GRADIENTS_TAKE = takes(
    f"grad: {FLOATS} [S, H]; y: {FLOATS} [R, H]; weights: {FLOATS} [S, K]; row_of_slot: int64 [S, K];"
    "padding_rows: int64 [_]?; K > 0"
)


@operation("unpermute_bwd", _gradients, takes=_GRADIENTS_TAKE)
def unpermute_bwd(
    grad: Tensor, y: Tensor, weights: Tensor, row_of_slot: Tensor, padding_rows: Tensor | None, needs_weights: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `sum_slots` in y [R, H] and in weights ([T, K] float32, empty unless asked for)."""
    from . import triton

    return triton.unpermute_bwd(grad, y, weights, row_of_slot, padding_rows, needs_weights)


def _spread(x: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, padding_rows: Tensor | None) -> Tensor:
    if x.device.type == "cuda" and not definitions_only() and not _ROWS.misfit(x, row_of_slot, padding_rows):
        return permute_rows(x, row_of_slot, padding_rows)
    return reference.gather_rows(x, slot_of_row, row_of_slot.shape[1], padding_rows is not None)


def _sum(y: Tensor, row_of_slot: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    if y.device.type == "cuda" and not definitions_only() and not _SLOTS.misfit(y, row_of_slot, weights):
        return sum_slots(y, row_of_slot, weights, dtype)
    found = sum_rows(y, row_of_slot, weights, dtype)
    return reference.sum_slots(y, row_of_slot, weights, dtype) if found is None else found


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, padding_rows: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(row_of_slot)
        ctx.dtype = x.dtype
        return _spread(x.to(dtype), slot_of_row, row_of_slot, padding_rows)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (row_of_slot,) = ctx.saved_tensors
        return _sum(grads[0], row_of_slot, None, ctx.dtype), None, None, None, None


class _Sum(torch.autograd.Function):
    """The adjoint of `_Permute`."""

    @staticmethod
    def forward(
        ctx, y: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, padding_rows: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(slot_of_row, row_of_slot, padding_rows)
        ctx.dtype = y.dtype
        return own_result(_sum(y, row_of_slot, None, dtype))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return _spread(grads[0].to(ctx.dtype), *ctx.saved_tensors), None, None, None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        y: Tensor,
        weights: Tensor,
        slot_of_row: Tensor,
        row_of_slot: Tensor,
        padding_rows: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(y, weights, slot_of_row, row_of_slot, padding_rows)
        return own_result(_sum(y, row_of_slot, weights, dtype))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        y, weights, slot_of_row, row_of_slot, padding_rows = ctx.saved_tensors
        needs_weights = ctx.needs_input_grad[1]
        if (
            grad.device.type == "cuda"
            and not definitions_only()
            and not _GRADIENTS_TAKE.misfit(grad, y, weights, row_of_slot, padding_rows)
        ):
            dy, d_weights = unpermute_bwd(grad, y, weights, row_of_slot, padding_rows, needs_weights)
        else:
            dy = reference.spread_slots(grad, slot_of_row, weights, padding_rows is not None, y.dtype)
            d_weights = reference.slot_products(grad, y, row_of_slot) if needs_weights else None
        d_weights = d_weights.to(weights.dtype) if needs_weights and d_weights is not None else None
        return dy, d_weights, None, None, None, None


def sort_by_expert(indices: Tensor, num_experts: int, *, align: int = 1) -> Permutation:
    """Return the permutation that sorts slots by expert, stably.

    indices: [T, K] integer, entries 0..num_experts-1. align: fill every expert's rows up to a multiple with rows of
    zeros, as a GEMM over quantized blocks of rows wants; the number of rows then still depends on shapes only.
    Raises ValueError where align is below 1.
    """
    if align < 1:
        raise ValueError(f"align is {align}; allowed: 1 or more rows")
    if indices.device.type != "cuda" or definitions_only() or _INDICES.misfit(indices):
        return reference.sort_by_expert(indices, num_experts, align)
    slots, rows, tokens, filled, padding_rows = sort_by_expert_op(indices, num_experts, align)
    return Permutation(slots, rows, tokens, filled, padding_rows if align > 1 else None)


def permute(x: Tensor, permutation: Permutation, *, dtype: torch.dtype | None = None) -> Tensor:
    """Copy each token's row to its K experts' rows, sorted by expert: [T, H] -> [R, H] in `dtype` (None: x's), padding
    rows zero.

    Any dtype: rows quantized each on its own can be permuted as they are, values and scales alike. Differentiable in x;
    the gradient is summed in float32 and rounded once, to x's dtype.
    """
    order = (permutation.slot_of_row, permutation.row_of_slot, permutation.padding_rows)
    if not torch.is_grad_enabled():
        return _spread(x.to(dtype or x.dtype), *order)
    return _Permute.apply(x, *order, dtype or x.dtype)


def unpermute(
    y: Tensor, permutation: Permutation, weights: Tensor | None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return each token's weighted sum of its K experts' rows: [R, H] -> [T, H], in `dtype` (None: y's).

    weights: [T, K] from `router_topk`, or None where rows carry their weight already. The sum runs in float32, k = 0
    first, and is rounded once. Differentiable in y and weights.
    """
    if not torch.is_grad_enabled():
        return _sum(y, permutation.row_of_slot, weights, dtype or y.dtype)
    order = (permutation.slot_of_row, permutation.row_of_slot, permutation.padding_rows, dtype or y.dtype)
    return _Sum.apply(y, *order) if weights is None else _WeightedSum.apply(y, weights, *order)
