"""The dense maps of Transformer Engine's router functions, each against its definition written with torch.topk."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import te_models.layers as te

T, E = 40, 16
SCORE = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "sqrtsoftplus": lambda x: F.softplus(x).sqrt()}


def best(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> Tensor:
    """The experts [T, K] with the largest scores, in the best groups."""
    if num_groups and group_topk:
        groups = scores.view(T, num_groups, -1)
        values = groups.topk(topk // group_topk, -1).values.sum(-1)
        kept = torch.zeros(T, num_groups).scatter(1, values.topk(group_topk, -1).indices, 1) > 0
        scores = groups.masked_fill(~kept[..., None], -torch.inf).view(T, E)
    return scores.topk(topk, -1).indices


def defined(logits: Tensor, topk: int, pre: bool, groups: tuple, scaling: float | None, name: str, bias: Tensor | None):
    """(probs, routing_map) in float64."""
    scores = SCORE[name](logits) if pre or name != "softmax" else logits
    chosen = best(scores if bias is None else scores + bias, topk, *groups)
    weights = scores.gather(1, chosen)
    if name == "softmax" and not pre:
        weights = weights.softmax(-1)
    if name != "softmax" and topk > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    zeros = torch.zeros(T, E, dtype=torch.float64)
    return zeros.scatter(1, chosen, weights * (scaling or 1)), zeros.scatter(1, chosen, 1) > 0


@pytest.mark.parametrize("scaling", [None, 2.5])
@pytest.mark.parametrize("topk, groups", [(1, (None, None)), (6, (None, None)), (6, (8, 3)), (6, (4, 2)), (4, (4, 4))])
@pytest.mark.parametrize("name, pre", [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", 0)])
def test_dense_maps(name: str, pre: bool, topk: int, groups: tuple, scaling: float | None) -> None:
    """Groups valued by one, two or three of their scores."""
    logits = torch.randn(T, E).requires_grad_()
    bias = None if name == "softmax" else torch.randn(E) / 10
    probs, mask = te.fused_topk_with_score_function(logits, topk, bool(pre), *groups, scaling, name, bias)
    exact = logits.detach().double().requires_grad_()
    expected, expected_mask = defined(exact, topk, bool(pre), groups, scaling, name, bias)
    assert mask.dtype is torch.bool and torch.equal(mask, expected_mask)
    torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=1e-7)
    dy = torch.randn(T, E)
    (ours,), (theirs,) = torch.autograd.grad(probs, logits, dy), torch.autograd.grad(expected, exact, dy.double())
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SCORE)
def test_scores_and_the_loss_of_balance(name: str) -> None:
    logits = torch.randn(T, E).bfloat16().requires_grad_()
    mask, scores = te.fused_compute_score_for_moe_aux_loss(logits, 4, name)
    expected = SCORE[name](logits.double())
    expected = expected / expected.sum(-1, keepdim=True)
    assert scores.dtype is torch.float32 and torch.equal(mask.sum(1), torch.full((T,), 4))
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-7)
    assert bool((expected.masked_fill(~mask, 2).amin(1) >= expected.masked_fill(mask, -1).amax(1)).all())
    counts = mask.sum(0)
    loss = te.fused_moe_aux_loss(scores, counts, T, E, 4, 0.01)
    right = E * 0.01 / (4 * T * T) * (expected.sum(0) * counts).sum()
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=0)
    assert te.fused_moe_aux_loss(scores.bfloat16(), counts, torch.tensor(T), E, 4, 0.01).dtype is torch.bfloat16
    (ours,), (theirs,) = torch.autograd.grad(loss, logits), torch.autograd.grad(right, logits)
    torch.testing.assert_close(ours, theirs, rtol=2.0**-6, atol=1e-7)


def test_leading_dimensions_and_compiled() -> None:
    logits = torch.randn(2, T, E)
    options = (4, True, 4, 2, None, "softmax", None)
    expected = te.fused_topk_with_score_function(logits, *options)
    compiled = torch.compile(te.fused_topk_with_score_function, fullgraph=True, backend="aot_eager")
    for found in (compiled(logits, *options), te.fused_topk_with_score_function(logits.flatten(0, 1), *options)):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.view(2, T, E), b)


@pytest.mark.parametrize(
    "options, message",
    [
        ((4, False, None, None, None, "tanh", None), "score_function is 'tanh'; allowed: 'softmax', 'sigmoid', 'sqrts"),
        ((17, False, None, None, None, "softmax", None), "topk is 17; allowed: 1 to 16, the number of experts"),
        ((4, False, 3, 2, None, "softmax", None), "num_groups is 3 with group_topk 2 and topk 4; allowed: a divisor"),
        ((6, False, 8, 2, None, "softmax", None), "topk is 6; allowed: at most 4, in the best groups"),
        ((4, False, None, None, None, "softmax", torch.zeros(E)), "expert_bias is given with score_function 'softmax'"),
    ],
)
def test_what_does_not_fit_is_refused(options: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        te.fused_topk_with_score_function(torch.randn(T, E), *options)


def test_maps_of_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="routing_map_format is 'bitmap_u8', which this library does not have"):
        te.fused_compute_score_for_moe_aux_loss(torch.randn(T, E), 2, "softmax", routing_map_format="bitmap_u8")
    with pytest.raises(ValueError, match=r"tokens_per_expert has shape \(3,\); allowed: \(16,\)"):
        te.fused_moe_aux_loss(torch.rand(T, E), torch.ones(3), T, E, 2, 0.01)
