"""Transformer Engine's functions of a mixture of experts, as its scripts call them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import te_models.layers as te

T, E, K, H = 9, 4, 2, 16


def routed() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, probabilities [T, E], the experts of each token [T, K] and their mask [T, E]."""
    torch.manual_seed(0)
    x = torch.randn(T, H, requires_grad=True)
    probs, indices = torch.randn(T, E).softmax(-1).topk(K)
    mask = torch.zeros(T, E, dtype=torch.int32).scatter(1, indices, 1)
    return x, torch.zeros(T, E).scatter(1, indices, probs).requires_grad_(), indices, mask


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_experts_between_permute_and_unpermute(map_type: str) -> None:
    x, probs, indices, mask = routed()
    experts = te.GroupedLinear(E, H, H, bias=False)
    expected = sum((probs * mask)[:, e, None] * F.linear(x, experts.weight[e]) for e in range(E))
    merging = probs if map_type == "mask" else probs.gather(1, indices)
    rows, row_id_map = te.moe_permute(x, mask if map_type == "mask" else indices, T * K, map_type=map_type)
    y = experts(rows, mask.sum(0).tolist())
    y = te.moe_unpermute(y, row_id_map, merging_probs=merging, restore_shape=x.shape, map_type=map_type)
    torch.testing.assert_close(y, expected)
    ours, theirs = (torch.autograd.grad(t.square().sum(), (x, probs, experts.weight)) for t in (y, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_probabilities_travel_with_the_rows() -> None:
    x, probs, _, mask = routed()
    rows, row_probs, row_id_map = te.moe_permute_with_probs(x, probs, mask)
    assert rows.shape == (T * K, H) and torch.equal(row_probs, probs.t()[mask.t() != 0])
    y = te.moe_unpermute(rows * row_probs[:, None], row_id_map, restore_shape=x.shape)
    torch.testing.assert_close(y, x * probs.sum(1, keepdim=True))
    (gradient,) = torch.autograd.grad(row_probs.sum(), probs)
    assert torch.equal(gradient, mask.float())


@pytest.mark.parametrize("wanted", [T * K - 5, T * K + 3])
def test_another_number_of_rows_drops_the_last_or_adds_zeros(wanted: int) -> None:
    x, probs, _, mask = routed()
    whole, _ = te.moe_permute(x, mask)
    rows, row_id_map = torch.compile(te.moe_permute, fullgraph=True, backend="aot_eager")(x, mask, wanted)
    kept = min(wanted, T * K)
    assert rows.shape == (wanted, H) and torch.equal(rows[:kept], whole[:kept]) and not rows[kept:].any()
    expected = torch.zeros(T, H)
    pairs = [(t, e) for e in range(E) for t in range(T) if mask[t, e]][:kept]
    for t, e in pairs:
        expected[t] += x[t] * probs[t, e]
    torch.testing.assert_close(te.moe_unpermute(rows, row_id_map, probs), expected)


def test_chunks_are_sorted() -> None:
    x, probs = torch.randn(10, H), torch.randn(10)
    sizes, order = torch.tensor([3, 0, 5, 2]), torch.tensor([2, 0, 3, 1])
    chunks = x.split(sizes.tolist())
    expected = torch.cat([chunks[i] for i in order])
    assert torch.equal(te.moe_sort_chunks_by_index(x, sizes, order), expected)
    rows, row_probs = te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    assert torch.equal(rows, expected) and torch.equal(row_probs, torch.cat([probs[3:8], probs[:3], probs[8:]]))


def test_what_does_not_fit_is_refused() -> None:
    x, probs, _, mask = routed()
    rows, row_id_map = te.moe_permute(x, mask)
    with pytest.raises(ValueError, match="map_type is 'table'; allowed: 'mask', 'index'"):
        te.moe_permute(x, mask, map_type="table")
    with pytest.raises(ValueError, match=r"routing_map has shape \(8, 4\); allowed: 9 tokens by experts"):
        te.moe_permute(x, mask[1:])
    with pytest.raises(ValueError, match="needs restore_shape, the shape of the tokens, or merging_probs"):
        te.moe_unpermute(rows, row_id_map)
    with pytest.raises(ValueError, match="probs and merging_probs are both given"):
        te.moe_unpermute(rows, row_id_map, probs, probs=probs)
