"""Router kernels: the reference's choices, ties included; weights and gradients against float64 at those choices."""

import pytest
import torch

from te_models.kernels.router import op, reference
from tests.kernels.triton.op_inputs import ROUTER_COUNTS as COUNTS
from tests.kernels.triton.op_inputs import ROUTER_SCORES as SCORES
from tests.kernels.triton.op_inputs import router_inputs as inputs

F32 = 2.0**-24

REAL = [(8192, 8, 2, None, None, "max"), (16384, 128, 8, None, None, "max"), (8191, 256, 8, 8, 4, "top2_sum")]


def run(logits, bias, counts, scores):
    _, topk, groups, topk_groups, group_score = counts
    sigmoid, after, _, normalize, eps, scaling = scores
    flags = (sigmoid, after, normalize, eps, scaling)
    return op.router_topk_fwd(logits, bias, topk, *flags, groups, topk_groups, group_score == "top2_sum")


def defined(logits, bias, counts, scores):
    _, topk, groups, topk_groups, group_score = counts
    sigmoid, after, _, normalize, eps, scaling = scores
    options = {"score": "sigmoid" if sigmoid else "softmax", "score_after_topk": after, "expert_bias": bias}
    options |= {"normalize": normalize, "normalize_eps": eps, "scaling_factor": scaling}
    options |= {"num_groups": groups, "topk_groups": topk_groups, "group_score": group_score}
    return reference.router_topk(logits, topk, **options)


def exact_weights(logits, indices, scores):
    """Weights of given choices, in the dtype of logits."""
    sigmoid, after, _, normalize, eps, scaling = scores
    z = logits.gather(1, indices) if after else logits
    weights = z.sigmoid() if sigmoid else z.softmax(-1)
    weights = weights if after else weights.gather(1, indices)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * scaling


def check(device, tokens, counts, scores, dtype) -> None:
    logits, bias = inputs(tokens, counts, scores, dtype, device)
    logits.requires_grad_()
    weights, indices = run(logits, bias, counts, scores)
    assert weights.dtype == torch.float32 and indices.dtype == torch.int64
    assert torch.equal(indices, defined(logits, bias, counts, scores)[1])
    leaf = logits.detach().double().requires_grad_()
    right = exact_weights(leaf, indices, scores)
    # An exponential's error grows with its argument; sums of up to E terms; three more operations.
    relative = (16 * (1 + leaf.detach().abs().amax(-1, keepdim=True) if tokens else 1.0) + counts[0] ** 0.5) * F32
    assert ((weights.double() - right.detach()).abs() <= relative * right.detach()).all()
    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (got,) = torch.autograd.grad(weights, logits, grad)
    (expected,) = torch.autograd.grad(right, leaf, grad.double())
    assert got.dtype == dtype
    # The gradient is a difference of terms that are at most the gradients times the weights, divided by their sum.
    terms = 4 * scores[5] * grad.double().abs().sum(-1, keepdim=True)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    assert ((got.double() - expected).abs() <= relative * terms + rounding * expected.abs()).all()


@pytest.mark.sentinels(
    "(True, False, True, False, 0.0, 2.5)-(15, 9, 5, 4, 'top2_sum')",
    "(True, False, False, True, 1e-20, 1.0)-(20, 3, 4, 1, 'max')",
    "(False, True, False, True, 0.5, 1.0)-(16, 4, 4, 2, 'top2_sum')",
    "(False, False, True, False, 0.0, 2.5)-(7, 7, None, None, 'max')",
    "(False, False, False, True, 0.5, 1.0)-(8, 2, None, None, 'max')",
    "(True, True, False, True, 1e-20, 1.0)-(1, 1, None, None, 'max')",
)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_choices_weights_and_gradients(device, counts, scores) -> None:
    check(device, 33, counts, scores, torch.float32)


@pytest.mark.parametrize("tokens", [0, 1, 65])
def test_token_counts_and_bfloat16(device, tokens) -> None:
    check(device, tokens, COUNTS[4], SCORES[1], torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL, ids=str)
@pytest.mark.parametrize("scores", [SCORES[0], SCORES[-1]], ids=str)
def test_real_sizes(device, case, scores) -> None:
    check(device, case[0], case[1:], scores, torch.float32)


@pytest.mark.parametrize("counts", [COUNTS[2], COUNTS[4]], ids=str)
def test_ties_infinities_and_not_a_number(device, counts) -> None:
    scores = (False, True, False, False, 0.0, 1.0)
    inf, nan = float("inf"), float("nan")
    rows = [[0.0], [0.0, -0.0], [-inf], [-inf, -inf, 3.0, -inf], [1.0, inf, 2.0, 1.0], [-3e38, -inf], [nan, 1.0], [nan]]
    logits = torch.tensor([(row * counts[0])[: counts[0]] for row in rows], device=device)
    got, expected = run(logits, None, counts, scores), defined(logits, None, counts, scores)
    assert torch.equal(got[1], expected[1]) and torch.allclose(got[0], expected[0], equal_nan=True)


def test_strides(device) -> None:
    scores = (True, False, True, True, 0.0, 1.0)
    logits, bias = inputs(9, COUNTS[4], scores, torch.float32, device)
    strided = logits.t().contiguous().t()
    for got, expected in zip(run(strided, bias, COUNTS[4], scores), run(logits, bias, COUNTS[4], scores), strict=True):
        assert torch.equal(got, expected)
