"""Experts of limited capacity: which choices find room, and rows filled up to exactly that room.

T tokens, K experts per token, E experts, C capacity, rows of an expert. GShard (arXiv 2006.16668, algorithm 1) keeps
the first tokens; keeping the assignments with the largest weights is batch-prioritized routing (arXiv 2106.05974).
"""

from fractions import Fraction

import torch
from torch import Tensor

from ..torch_versions import smaller
from .op import Permutation


def capacity_share(factor: float, num_experts: int) -> tuple[int, int]:
    """Return what part of all choices an expert takes, `factor` times its even share, as (numerator, denominator)."""
    exact = Fraction(str(factor))  # the decimal that was written, not the binary number next to it
    return exact.numerator, num_experts * exact.denominator


def expert_capacity(slots: int, share: tuple[int, int]) -> int:
    """Return C, a share of T K slots rounded up; a variable of the graph where the slots are."""
    numerator, denominator = share
    return -(-slots * numerator // denominator)


def within_capacity(indices: Tensor, weights: Tensor, num_experts: int, capacity: int, policy: str) -> Tensor:
    """Return which choices find room, [T, K] bool: of each expert the first `capacity`, in the order of tokens
    ("position") or of weights ("probs", the largest first, of equal ones the earlier token).

    indices: [T, K] integer, entries 0..num_experts-1; weights: [T, K].
    """
    experts = indices.flatten()
    order = torch.arange(experts.shape[0], device=experts.device)
    if policy == "probs":
        order = torch.sort(weights.detach().flatten(), descending=True, stable=True).indices
    by_expert, place = torch.sort(experts[order], stable=True)
    begins = torch.searchsorted(by_expert, torch.arange(num_experts, device=experts.device, dtype=by_expert.dtype))
    room = torch.arange(experts.shape[0], device=experts.device) - begins[by_expert] < capacity
    fits = torch.empty_like(room)
    fits[order[place]] = room
    return fits.view(indices.shape)


def fill_to_capacity(indices: Tensor, num_experts: int, capacity: int) -> Permutation:
    """Return the permutation that sorts slots by expert, each expert having exactly `capacity` rows.

    indices: [T, K] integer, entries 0..num_experts-1, or num_experts for a choice that was dropped; no expert has more
    than `capacity`. The result has max(E C, T K) rows. Dropped choices take rows that nobody else has, among them those
    that fill up the experts: their weight has to be zero. All sizes depend on shapes only.
    """
    experts, sorted_slots = torch.sort(indices.flatten(), stable=True)
    slots = experts.shape[0]
    begins = torch.searchsorted(experts, torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype))
    place = torch.arange(slots, device=experts.device) - begins[experts]  # among its expert's, or the dropped ones
    num_rows = -smaller(-num_experts * capacity, -slots)
    own = experts * capacity + place
    dropped = experts == num_experts
    occupied = torch.zeros(num_rows + 1, dtype=torch.bool, device=experts.device)
    occupied[torch.where(dropped, num_rows, own)] = True
    free = torch.sort(occupied[:num_rows].to(torch.uint8), stable=True).indices
    rows = torch.where(dropped, free[place], own)
    slot_of_row = torch.full((num_rows,), -1, device=experts.device)
    slot_of_row[rows] = sorted_slots
    row_of_slot = torch.empty_like(rows)
    row_of_slot[sorted_slots] = rows
    unused = free[dropped.sum() + torch.arange(num_rows - slots, device=experts.device)]
    tokens = begins[1:] - begins[:-1]
    full = torch.full_like(tokens, capacity)
    return Permutation(slot_of_row, row_of_slot.view(indices.shape), tokens, full, unused)
