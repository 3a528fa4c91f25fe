"""Token permutation for mixtures of experts, all in gather form.

T tokens, K experts per token, E experts, H hidden, R rows. A slot is the flat pair t*K + k; rows are slots sorted by
expert, each expert's rows optionally filled up to a multiple of `align` with rows of zeros.

Why gathers only: scatter-add order is not fixed on accelerators, so results would differ between runs, and a
gather writes every output once. The sort is stable, so within an expert rows stay in token order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_versions import smaller


class Permutation(NamedTuple):
    """Where each row comes from and goes to; all on the device of the router's indices, nothing is read on the host.

    slot_of_row: [R] int64, -1 for a row that only fills up; row_of_slot: [T, K] int64, its inverse.
    tokens_per_expert: [E] int64; rows_per_expert: [E] int64, the same filled up to a multiple of `align`.
    padding_rows: [R - T*K] int64, the rows that only fill up, those past the last expert included; None if align is 1.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    tokens_per_expert: Tensor
    rows_per_expert: Tensor
    padding_rows: Tensor | None


def row_count(slots: int, num_experts: int, align: int) -> int:
    """Return R: enough rows for any distribution of the slots, so that it depends on shapes only."""
    rows = slots + smaller(slots, num_experts) * (align - 1)
    return (rows + align - 1) // align * align


def sort_by_expert(indices: Tensor, num_experts: int, align: int = 1) -> Permutation:
    """Return the permutation that sorts slots by expert. indices: [T, K] integer, entries 0..num_experts-1."""
    experts, sorted_slots = torch.sort(indices.flatten(), stable=True)
    order = torch.arange(sorted_slots.shape[0], device=indices.device)
    boundaries = torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
    starts = torch.searchsorted(experts, boundaries)
    tokens = starts[1:] - starts[:-1]
    if align == 1:
        return Permutation(sorted_slots, _inverse(sorted_slots, order).view(indices.shape), tokens, tokens, None)
    filled = (tokens + align - 1) // align * align
    shift = filled.cumsum(0) - filled - starts[:-1]  # how far padding before an expert moves its rows
    rows = order + shift[experts]
    num_rows = row_count(sorted_slots.shape[0], num_experts, align)
    slot_of_row = torch.full((num_rows,), -1, device=indices.device)
    slot_of_row[rows] = sorted_slots
    row_of_slot = _inverse(sorted_slots, rows).view(indices.shape)
    return Permutation(slot_of_row, row_of_slot, tokens, filled, _padding_rows(tokens, filled, num_rows, rows.shape[0]))


def _inverse(sorted_slots: Tensor, rows: Tensor) -> Tensor:
    row_of_slot = torch.empty_like(sorted_slots)
    row_of_slot[sorted_slots] = rows
    return row_of_slot


def _padding_rows(tokens: Tensor, filled: Tensor, num_rows: int, slots: int) -> Tensor:
    """Return the rows without a slot in ascending order; they are as many as shapes say, wherever they are."""
    number = torch.arange(num_rows - slots, device=tokens.device)
    missing = filled - tokens
    expert = torch.searchsorted(missing.cumsum(0), number, right=True)  # E for those past the last expert
    # Before the n-th padding row of expert e stand n padding rows and the tokens of experts up to e.
    tokens_before = torch.cat([tokens.cumsum(0), tokens.sum(0, keepdim=True)])
    return number + tokens_before[expert]


def gather_rows(x: Tensor, slot_of_row: Tensor, topk: int, padded: bool) -> Tensor:
    """Copy each token to its K rows: [T, H] -> [R, H]; padding rows, if there may be some, are zero."""
    if not padded:
        return x.index_select(0, slot_of_row // topk)  # an index in brackets takes four to seven times as long
    values = x.view(torch.uint8) if x.dtype.itemsize == 1 else x  # torch.where knows no eight-bit floats
    rows = torch.where((slot_of_row >= 0)[:, None], values.index_select(0, slot_of_row.clamp(min=0) // topk), 0)
    return rows.view(x.dtype)


def sum_slots(y: Tensor, row_of_slot: Tensor, weights: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Sum each token's K rows, times weights [T, K] if given: [R, H] -> [T, H] in `dtype` (None: y's).

    Float32, k = 0 first, one rounding.
    """
    total = None
    for k in range(row_of_slot.shape[1]):
        term = y.index_select(0, row_of_slot[:, k]).float()
        if weights is not None:
            term = term * weights[:, k, None].float()
        total = term if total is None else total + term
    assert total is not None, "a token has at least one slot"
    return total.to(dtype or y.dtype)


def spread_slots(grad: Tensor, slot_of_row: Tensor, weights: Tensor, padded: bool, dtype: torch.dtype) -> Tensor:
    """Gradient of `sum_slots` in y: each row gets its token's gradient times its weight: [T, H] -> [R, H] in `dtype`,
    y's."""
    rows = gather_rows(grad, slot_of_row, weights.shape[1], padded)
    weight_of_row = weights.flatten()[slot_of_row.clamp(min=0) if padded else slot_of_row]
    return (rows * weight_of_row[:, None].float()).to(dtype)


def slot_products(grad: Tensor, y: Tensor, row_of_slot: Tensor) -> Tensor:
    """Gradient of `sum_slots` in weights: float32 inner products of grad [T, H] with each token's K rows: [T, K]."""
    grad = grad.float()
    slots = range(row_of_slot.shape[1])
    return torch.stack([(grad * y.index_select(0, row_of_slot[:, k]).float()).sum(-1) for k in slots], dim=-1)
