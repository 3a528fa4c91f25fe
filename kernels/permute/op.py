"""Public permute and unpermute: the reference with its gradients, which autograd would turn into scatter-adds."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import Permutation, gather_rows, slot_products, sort_by_expert, spread_slots, sum_slots

__all__ = ["Permutation", "permute", "sort_by_expert", "unpermute"]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, slot_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot)
        return gather_rows(x, slot_of_row, row_of_slot.shape[1])

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        (row_of_slot,) = ctx.saved_tensors
        return sum_slots(grad, row_of_slot, None), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, weights: Tensor, slot_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, slot_of_row, row_of_slot)
        return sum_slots(y, row_of_slot, weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        y, weights, slot_of_row, row_of_slot = ctx.saved_tensors
        d_weights = slot_products(grad, y, row_of_slot).to(weights.dtype) if ctx.needs_input_grad[1] else None
        return spread_slots(grad, slot_of_row, weights), d_weights, None, None


def permute(x: Tensor, permutation: Permutation) -> Tensor:
    """Copy each token's row to its K experts' rows, sorted by expert: [T, H] -> [T*K, H]. Differentiable in x."""
    return _Permute.apply(x, permutation.slot_of_row, permutation.row_of_slot)


def unpermute(y: Tensor, permutation: Permutation, weights: Tensor) -> Tensor:
    """Return each token's weighted sum of its K experts' rows: [T*K, H] -> [T, H], in y's dtype.

    weights: [T, K] from `router_topk`. The sum runs in float32, k = 0 first, and is rounded once. Differentiable in
    y and weights.
    """
    return _Unpermute.apply(y, weights, permutation.slot_of_row, permutation.row_of_slot)
