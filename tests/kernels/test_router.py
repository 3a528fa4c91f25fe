"""Router: against its definition in Python floats, transformers' routers, and known values of the losses."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from te_models.kernels.router import load_balancing_loss, router_probabilities, router_topk, router_z_loss
from tests.covering import examples

UNIT = 2.0**-24


def best(values: Sequence[float], k: int) -> list[int]:
    """Indices of the k largest, largest first, ties to the lower index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def defined(row: list[float], k: int, options: dict) -> tuple[list[float], list[int]]:
    """Weights and experts of one token, by the docstring of router_topk."""

    def scored(values: list[float]) -> list[float]:
        if options["score"] == "sigmoid":
            return [1 / (1 + math.exp(-v)) for v in values]
        total = sum(math.exp(v) for v in values)
        return [math.exp(v) / total for v in values]

    after = options["score_after_topk"]
    scores = row if after else scored(row)
    choice = [s + b for s, b in zip(scores, options["expert_bias"] or [0.0] * len(row), strict=True)]
    if options["num_groups"] is not None:
        size = len(row) // options["num_groups"]
        groups = [choice[i : i + size] for i in range(0, len(row), size)]
        take = 1 if options["group_score"] == "max" else 2
        kept = best([sum(sorted(g)[-take:]) for g in groups], options["topk_groups"])
        choice = [c if i // size in kept else -math.inf for i, c in enumerate(choice)]
    chosen = best(choice, k)
    weights = [scores[i] for i in chosen]
    if after:
        weights = scored(weights)
    if options["normalize"]:
        total = sum(weights) + options["normalize_eps"]
        weights = [w / total for w in weights]
    return [w * options["scaling_factor"] for w in weights], chosen


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, dict]:
    groups = draw(st.sampled_from([None, 2, 4]))
    experts = draw(st.integers(1, 4)) * (groups or 1) * (2 if groups else 1)
    topk_groups = None if groups is None else draw(st.integers(1, groups))
    k = draw(st.integers(1, experts if groups is None else experts // groups * topk_groups))
    seed, tokens = draw(st.integers(0, 2**31)), draw(st.integers(0, 9))
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 2
    # Multiples of 1/4 make ties common and keep them exact through every score.
    logits = (logits * 4).round() / 4
    after = draw(st.booleans())
    bias = None
    if not after and draw(st.booleans()):
        bias = (torch.randn(experts, generator=torch.Generator().manual_seed(seed + 1))).tolist()
    options = {
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "score_after_topk": after,
        "expert_bias": bias,
        "normalize": draw(st.booleans()),
        "normalize_eps": draw(st.sampled_from([0.0, 1e-20, 0.5])),
        "scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "num_groups": groups,
        "topk_groups": topk_groups,
        "group_score": draw(st.sampled_from(["max", "top2_sum"])),
    }
    return logits, k, options


@settings(deadline=None, max_examples=examples(200))
@given(cases())
def test_topk_is_as_defined(case: tuple[torch.Tensor, int, dict]) -> None:
    logits, k, options = case
    bias = options["expert_bias"]
    passed = {**options, "expert_bias": None if bias is None else torch.tensor(bias)}
    weights, indices = router_topk(logits, k, **passed)
    assert weights.dtype == torch.float32 and weights.shape == indices.shape == (logits.shape[0], k)
    for row, got, chosen in zip(logits.tolist(), weights.tolist(), indices.tolist(), strict=True):
        assert len(set(chosen)) == k
        expected, expected_chosen = defined(row, k, options)
        assert chosen == expected_chosen and got == pytest.approx(expected, rel=64 * UNIT, abs=UNIT)


def test_ties_go_to_the_lower_expert() -> None:
    weights, indices = router_topk(torch.zeros(3, 6).bfloat16(), 4)
    assert indices.tolist() == [[0, 1, 2, 3]] * 3 and weights.tolist() == [[0.25] * 4] * 3


def test_extreme_logits_choose_distinct_experts() -> None:
    logits = torch.full((1, 4), -torch.inf)
    logits[0, 2] = 3.0
    _, indices = router_topk(logits, 3, score_after_topk=True)
    assert indices.tolist() == [[2, 0, 1]]


def test_mixtral_and_qwen3_routers() -> None:
    x, weight = torch.randn(33, 16), torch.randn(8, 16)
    mixtral = MixtralTopKRouter(MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2))
    for normalize in (True, False):
        config = Qwen3MoeConfig(
            hidden_size=16, num_local_experts=8, num_experts=8, num_experts_per_tok=3, norm_topk_prob=normalize
        )
        for theirs, k, norm in ((mixtral, 2, True), (Qwen3MoeTopKRouter(config), 3, normalize)):
            theirs.weight.data.copy_(weight)
            logits, expected, indices = theirs(x)
            weights, chosen = router_topk(logits, k, normalize=norm)
            assert torch.equal(chosen, indices) and torch.equal(weights, expected)


def test_deepseek_router() -> None:
    config = DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    theirs = DeepseekV3TopkRouter(config)
    theirs.weight.data.normal_()
    theirs.e_score_correction_bias.normal_(std=0.1)
    logits, expected, indices = theirs(torch.randn(65, 16))
    options = {"score": "sigmoid", "normalize_eps": 1e-20, "scaling_factor": 2.5, "num_groups": 4, "topk_groups": 2}
    weights, chosen = router_topk(logits, 4, expert_bias=theirs.e_score_correction_bias, **options)
    order, their_order = chosen.argsort(dim=-1), indices.argsort(dim=-1)
    assert torch.equal(chosen.gather(1, order), indices.gather(1, their_order))
    assert torch.allclose(weights.gather(1, order), expected.gather(1, their_order), rtol=8 * UNIT, atol=0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("after", [False, True])
def test_gradient_through_the_weights(score: str, after: bool) -> None:
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights, indices = router_topk(logits, 3, score=score, score_after_topk=after, normalize_eps=1e-3)
    grad = torch.randn(9, 3, generator=torch.Generator().manual_seed(2))
    weights.backward(grad)
    exact = logits.detach().double().requires_grad_()

    def scored(t: torch.Tensor) -> torch.Tensor:
        return t.softmax(-1) if score == "softmax" else t.sigmoid()

    chosen = scored(exact.gather(1, indices)) if after else scored(exact).gather(1, indices)
    (chosen / (chosen.sum(-1, keepdim=True) + 1e-3)).backward(grad.double())
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=0, atol=64 * UNIT)


def test_the_bias_selects_without_entering_weight_or_gradient() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, 10.0], requires_grad=True)
    weights, indices = router_topk(logits, 1, score="sigmoid", expert_bias=bias, normalize=False)
    assert indices.item() == 2 and weights.item() == 0.5
    weights.sum().backward()
    assert bias.grad is None and logits.grad[0, :2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"topk": 0}, "topk is 0; allowed: 1 to 8"),
        ({"topk": 9}, "topk is 9; allowed: 1 to 8"),
        ({"topk": 3, "num_groups": 4, "topk_groups": 1}, "allowed: 1 to 2"),
        ({"topk": 1, "num_groups": 3, "topk_groups": 1}, "num_groups is 3; allowed: a divisor of 8"),
        ({"topk": 1, "num_groups": 4, "topk_groups": 5}, "topk_groups is 5; allowed: 1 to 4"),
        ({"topk": 1, "score": "relu"}, "score is 'relu'"),
        ({"topk": 1, "group_score": "mean"}, "group_score is 'mean'"),
    ],
)
def test_impossible_choices_are_refused(arguments: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        router_topk(torch.zeros(2, 8), **arguments)


def test_load_balancing_loss_is_one_when_even_and_e_when_collapsed() -> None:
    assert load_balancing_loss(torch.full((8, 4), 0.25), torch.arange(8)[:, None] % 4).item() == 1.0
    collapsed = torch.zeros(8, 4)
    collapsed[:, 1] = 1.0
    assert load_balancing_loss(collapsed, torch.ones(8, 1, dtype=torch.int64)).item() == 4.0


@pytest.mark.parametrize("k", [1, 3])
def test_load_balancing_loss_against_transformers(k: int) -> None:
    """Theirs counts choices per token, so it is k times ours."""
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(50, generator=torch.Generator().manual_seed(1)) < 0.7
    _, indices = router_topk(logits, k)
    probabilities = router_probabilities(logits)
    theirs = load_balancing_loss_func((logits,), 6, k)
    assert load_balancing_loss(probabilities, indices).item() * k == pytest.approx(theirs.item(), rel=1e-6)
    theirs = load_balancing_loss_func((logits,), 6, k, mask[None])
    assert load_balancing_loss(probabilities, indices, mask).item() * k == pytest.approx(theirs.item(), rel=1e-6)


def test_masked_losses_equal_those_of_the_kept_tokens() -> None:
    logits = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.arange(20) % 3 > 0
    _, indices = router_topk(logits, 2)
    for masked, kept in (
        (
            load_balancing_loss(router_probabilities(logits, "sigmoid"), indices, mask),
            load_balancing_loss(router_probabilities(logits[mask], "sigmoid"), indices[mask]),
        ),
        (router_z_loss(logits, mask), router_z_loss(logits[mask])),
    ):
        assert masked.item() == pytest.approx(kept.item(), rel=8 * UNIT)
        (gradient,) = torch.autograd.grad(masked, logits, retain_graph=True)
        assert gradient[mask].abs().min() > 0 and gradient[~mask].abs().max() == 0


def test_sigmoid_probabilities_sum_to_one() -> None:
    probabilities = router_probabilities(torch.randn(7, 5), "sigmoid")
    assert torch.allclose(probabilities.sum(-1), torch.ones(7), rtol=8 * UNIT, atol=0)


def test_z_loss_value() -> None:
    logits = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)) * 5
    exact = logits.double().logsumexp(-1).square().mean()
    assert router_z_loss(logits).item() == pytest.approx(exact.item(), rel=16 * UNIT)


def test_losses_without_tokens_are_zero() -> None:
    logits = torch.zeros(0, 4)
    _, indices = router_topk(logits, 2)
    assert load_balancing_loss(router_probabilities(logits), indices).item() == 0
    assert router_z_loss(logits).item() == 0
    nobody = torch.zeros(3, dtype=torch.bool)
    _, indices = router_topk(torch.ones(3, 4), 2)
    assert load_balancing_loss(torch.full((3, 4), 0.25), indices, nobody).item() == 0
    assert router_z_loss(torch.ones(3, 4), nobody).item() == 0


@pytest.mark.slow
def test_compiled_choice_equals_eager_ties_included() -> None:
    compiled = torch.compile(router_topk, fullgraph=True, dynamic=True)
    for tokens in (3, 64, 65):
        logits = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens)).bfloat16().round()
        weights, indices = router_topk(logits, 4)
        got_weights, got_indices = compiled(logits, 4)
        assert torch.equal(got_indices, indices)
        assert torch.allclose(got_weights, weights, rtol=16 * UNIT, atol=0)


@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "topk_groups": 2}], ids=["all", "groups"])
def test_few_tokens_choose_as_many_do(groups: dict) -> None:
    """By sorting, with the same ties: to the lower index, also among scores that are -inf."""
    levels = torch.tensor([-torch.inf, -1.0, 0.0, 2.0])
    logits = levels[torch.randint(4, (200, 16), generator=torch.Generator().manual_seed(0))]
    many = router_topk(logits, 4, score="sigmoid", normalize=False, **groups)
    few = [router_topk(rows, 4, score="sigmoid", normalize=False, **groups) for rows in logits.split(10)]
    for one, parts in zip(many, zip(*few, strict=True), strict=True):
        assert torch.equal(one, torch.cat(parts))
