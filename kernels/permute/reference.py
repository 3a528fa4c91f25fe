"""Token permutation for mixtures of experts, all in gather form.

T tokens, K experts per token, E experts, H hidden. A slot is the flat pair t*K + k; rows are slots sorted by expert.

Why gathers only: scatter-add order is not fixed on accelerators, so results would differ between runs, and a
gather writes every output once. The sort is stable, so within an expert rows stay in token order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Permutation(NamedTuple):
    """Where each row comes from and goes to.

    slot_of_row: [T*K] int64; row_of_slot: [T, K] int64, its inverse; tokens_per_expert: [E] int64, rows of each
    expert, on the same device (nothing is read on the host).
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    tokens_per_expert: Tensor


def sort_by_expert(indices: Tensor, num_experts: int) -> Permutation:
    """Return the permutation that sorts slots by expert. indices: [T, K] integer, entries 0..num_experts-1."""
    experts, slot_of_row = torch.sort(indices.flatten(), stable=True)
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot[slot_of_row] = torch.arange(slot_of_row.shape[0], device=slot_of_row.device)
    boundaries = torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
    starts = torch.searchsorted(experts, boundaries)
    return Permutation(slot_of_row, row_of_slot.view(indices.shape), starts[1:] - starts[:-1])


def gather_rows(x: Tensor, slot_of_row: Tensor, topk: int) -> Tensor:
    """Copy each token to its topk rows: [T, H] -> [T*K, H]."""
    return x[slot_of_row // topk]


def sum_slots(y: Tensor, row_of_slot: Tensor, weights: Tensor | None) -> Tensor:
    """Sum each token's K rows, times weights [T, K] if given: [T*K, H] -> [T, H].

    Float32, k = 0 first, one rounding.
    """
    total = None
    for k in range(row_of_slot.shape[1]):
        term = y[row_of_slot[:, k]].float()
        if weights is not None:
            term = term * weights[:, k, None].float()
        total = term if total is None else total + term
    assert total is not None, "a token has at least one slot"
    return total.to(y.dtype)


def spread_slots(grad: Tensor, slot_of_row: Tensor, weights: Tensor) -> Tensor:
    """Gradient of `sum_slots` in y: each row gets its token's gradient times its weight: [T, H] -> [T*K, H]."""
    rows = gather_rows(grad, slot_of_row, weights.shape[1])
    return (rows * weights.flatten()[slot_of_row][:, None].float()).to(grad.dtype)


def slot_products(grad: Tensor, y: Tensor, row_of_slot: Tensor) -> Tensor:
    """Gradient of `sum_slots` in weights: float32 inner products of grad [T, H] with each token's K rows: [T, K]."""
    grad = grad.float()
    slots = range(row_of_slot.shape[1])
    return torch.stack([(grad * y[row_of_slot[:, k]].float()).sum(-1) for k in slots], dim=-1)
