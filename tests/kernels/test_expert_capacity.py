"""Experts of limited capacity: who finds room, against a loop; rows filled up to exactly the capacity."""

import pytest
import torch

from te_models.kernels.permute import (
    capacity_share,
    expert_capacity,
    fill_to_capacity,
    permute,
    unpermute,
    within_capacity,
)

SHAPES = [(7, 2, 4, 3), (12, 3, 5, 2), (1, 1, 2, 1), (9, 2, 3, 6), (16, 2, 4, 20)]  # T, K, E, C


def choices(tokens: int, topk: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each token, some popular, and weights of which some are equal."""
    generator = torch.Generator().manual_seed(tokens)
    popular = torch.rand(tokens, experts, generator=generator) + torch.linspace(1, 0, experts)
    return popular.topk(topk, dim=1).indices, torch.randint(1, 4, (tokens, topk), generator=generator) / 4


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize(("tokens", "topk", "experts", "capacity"), SHAPES)
def test_experts_keep_the_largest_or_first(tokens: int, topk: int, experts: int, capacity: int, policy: str) -> None:
    indices, weights = choices(tokens, topk, experts)
    kept = torch.zeros(tokens, topk, dtype=torch.bool)
    for expert in range(experts):
        slots = [(t, k) for t in range(tokens) for k in range(topk) if indices[t, k] == expert]
        if policy == "probs":
            slots.sort(key=lambda slot: -float(weights[slot]))  # stable: of equal ones the earlier token
        for slot in slots[:capacity]:
            kept[slot] = True
    assert torch.equal(within_capacity(indices, weights, experts, capacity, policy), kept)


@pytest.mark.parametrize(("tokens", "topk", "experts", "capacity"), SHAPES)
def test_every_expert_has_exactly_its_capacity_of_rows(tokens: int, topk: int, experts: int, capacity: int) -> None:
    indices, weights = choices(tokens, topk, experts)
    kept = within_capacity(indices, weights, experts, capacity, "position")
    order = fill_to_capacity(torch.where(kept, indices, experts), experts, capacity)
    rows = max(experts * capacity, tokens * topk)
    assert order.slot_of_row.shape == (rows,) and order.rows_per_expert.tolist() == [capacity] * experts
    assert order.tokens_per_expert.tolist() == [int((indices[kept] == e).sum()) for e in range(experts)]
    assert torch.equal(order.slot_of_row[order.row_of_slot.flatten()], torch.arange(tokens * topk))
    assert order.padding_rows is not None
    everything = torch.cat([order.row_of_slot.flatten(), order.padding_rows])
    assert torch.equal(everything.sort().values, torch.arange(rows))
    assert bool((order.slot_of_row[order.padding_rows] == -1).all())
    assert torch.equal((order.row_of_slot // capacity)[kept], indices[kept])
    x = torch.randn(tokens, 3, dtype=torch.float64)
    found = unpermute(permute(x, order), order, kept.double())
    assert torch.allclose(found, x * kept.sum(1, keepdim=True), rtol=1e-6)


def test_capacity_is_the_even_share_times_the_factor_rounded_up() -> None:
    assert [expert_capacity(64, capacity_share(factor, 8)) for factor in (1.0, 1.25, 0.5, 1.01)] == [8, 10, 4, 9]
    assert expert_capacity(10, capacity_share(1.1, 1)) == 11  # the decimal, not the binary number next to it
