"""Which experts each of 10,000 tokens uses, and how much, in every family with experts: as in transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import te_models.model.moe.layer
from te_models import GPTModel
from te_models.checkpoints import FAMILIES
from te_models.config import RouterConfig
from te_models.kernels.router import router_topk, weights_of
from te_models.model.moe.router import Router
from tests.checkpoints.family_cases import CASES, DENSE, WITHOUT_EXPERTS, make
from tests.checkpoints.hf_cases import transformers

COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
MIXTURES = {name for name, family in FAMILIES.items() if COUNTS & family.known}
MOE_CASES = [case for case, (name, _) in CASES.items() if name in MIXTURES and case not in (*DENSE, *WITHOUT_EXPERTS)]
ALONE = {"kimi_k2", "glm5_next"}
"""transformers has no such class, published files hold a deepseek_v3 model; and none for the text model alone, whose
logits test_text_part compares."""
FACTOR_BEHIND = {"laguna"}
"""Families whose scaling factor transformers gives the sum of the experts, not their weights."""
TOKENS = torch.randint(3, 61, (200, 50), generator=torch.Generator().manual_seed(1))
WEIGHT_BOUND = 1e-5
WIDER = {"qwen3_next": 1.5e-4, "qwen3_5_moe_text": 1.5e-4}
"""Bounds of families whose delta rule amplifies rounding: transformers' float32 weights are 4e-5 from its float64's,
and 7.6e-5 from ours with AVX2 alone."""

Choices = list[torch.Tensor]
"""For each layer with experts the weight of every expert, [T, E]; NaN where a token does not use it."""


def chosen(weights: torch.Tensor, indices: torch.Tensor, experts: int) -> torch.Tensor:
    """weights, indices: [T, K] -> [T, E], NaN where an expert is not among the indices."""
    return torch.full((len(indices), experts), float("nan")).scatter_(1, indices, weights.float())


def their_choices(model: transformers.PreTrainedModel, experts: int) -> Choices:
    """What the experts of a transformers model are given; Llama 4's get inputs, so there what its router returns."""
    found: Choices = []

    def seen(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if type(module).__name__ == "Llama4Router":
            found.append(output[0].where(output[0] > 0, float("nan")))
        elif len(args) == 3:
            found.append(chosen(args[2], args[1], experts))

    for module in model.modules():
        if type(module).__name__.endswith(("Experts", "Llama4Router")):
            module.register_forward_hook(seen)
    model(TOKENS)
    return found


def our_choices(monkeypatch: pytest.MonkeyPatch, model: GPTModel) -> tuple[Choices, Callable[..., Choices]]:
    """What our router decides, and a function that decides for the first layer again with some options changed."""
    found: Choices = []
    calls: list[tuple[torch.Tensor, int, dict[str, Any]]] = []

    def decide(logits: torch.Tensor, topk: int, options: dict[str, Any]) -> torch.Tensor:
        return chosen(*router_topk(logits, topk, **options), logits.shape[1])

    def seen(logits: torch.Tensor, topk: int, **options: Any) -> Any:
        calls.append((logits, topk, options))
        found.append(decide(*calls[-1]))
        return router_topk(logits, topk, **options)

    def by_token(logits: torch.Tensor, indices: torch.Tensor, **options: Any) -> torch.Tensor:
        weights = weights_of(logits, indices, **options)
        found.append(chosen(weights, indices, logits.shape[1]))
        return weights

    monkeypatch.setattr(te_models.model.moe.layer, "router_topk", seen)
    monkeypatch.setattr(te_models.model.moe.layer, "weights_of", by_token)
    model(TOKENS)
    logits, topk, options = calls[0]
    return found, lambda **changed: [decide(logits, topk, options | changed)]


def settled(a: Choices, b: Choices) -> torch.Tensor:
    """Which tokens are in sequences without a tie: where two experts, or keys of an indexer, share the last place in
    exact numbers, rounding decides for either, and what follows differs. At most two of 200 sequences have one."""
    ties = torch.stack([(x.isnan() != y.isnan()).any(1) for x, y in zip(a, b, strict=True)]).any(0)
    sequences = ties.view(TOKENS.shape).any(1)
    assert sequences.sum() <= 2
    return ~sequences.repeat_interleave(TOKENS.shape[1])


def same_experts(a: Choices, b: Choices) -> bool:
    return all(torch.equal(x.isnan(), y.isnan()) for x, y in zip(a, b, strict=True))


def largest_error(a: Choices, b: Choices) -> float:
    """The largest difference between weights, relative to the largest weight; of the same experts."""
    pairs = [(x.nan_to_num(0.0), y.nan_to_num(0.0)) for x, y in zip(a, b, strict=True)]
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


def options_that_choose(router: RouterConfig) -> dict[str, dict[str, Any]]:
    """Changes to a router after which some token uses other experts."""
    changes: dict[str, dict[str, Any]] = {}
    if router.expert_bias:
        changes["selection bias"] = {"expert_bias": None}
    if router.num_groups not in (None, 1):
        changes["groups"] = {"num_groups": None, "topk_groups": None}
        changes["score of groups"] = {"group_score": "max" if router.group_score == "top2_sum" else "top2_sum"}
    return changes


@pytest.mark.sentinels("mixtral", "deepseek_v3", "gpt_oss", "llama4", "hy_v3")
@pytest.mark.parametrize("case", [*MOE_CASES, "kimi_k2"])
@torch.no_grad()
def test_routing_is_identical(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same experts for each token in every layer, with the same weights; and the comparison sees what decides."""
    theirs = make("deepseek_v3" if case == "kimi_k2" else case)
    theirs.save_pretrained(tmp_path)
    if case == "kimi_k2":
        config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "kimi_k2"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    ours = GPTModel.from_pretrained(tmp_path).eval()
    moe = ours.config.moe
    expected = their_choices(theirs, moe.num_moe_experts)
    if theirs.config.model_type in FACTOR_BEHIND:
        expected = [weights * moe.router.scaling_factor for weights in expected]
    got, again = our_choices(monkeypatch, ours)
    assert len(got) == len(moe.layers or ()) > 0
    for layer in got:
        used = ~layer.isnan()
        assert layer.shape == (10_000, moe.num_moe_experts) and (used.sum(1) == moe.moe_router_topk).all()
        assert used.any(0).sum() > moe.moe_router_topk, "tokens differ in what they use"
    places = settled(got, expected)
    got, expected = [x[places] for x in got], [x[places] for x in expected]
    factors = [module.expert_scale for module in ours.modules() if isinstance(module, Router)]
    got = [w if factor is None else w * factor for w, factor in zip(got, factors, strict=True)]
    bound = WIDER.get(theirs.config.model_type, WEIGHT_BOUND)
    assert largest_error(got, expected) <= bound
    first = next(place for place, layer in enumerate(moe.layers) if layer not in moe.hash_layers)
    expected = expected[first : first + 1]
    for what, changed in options_that_choose(moe.router).items():
        assert not same_experts([x[places] for x in again(**changed)], expected), what
    if not moe.router.score_after_topk:
        changed = [x[places] for x in again(normalize=not moe.router.normalize)]
        assert same_experts(changed, expected) and largest_error(changed, expected) > bound


def test_every_family_with_experts_has_a_case() -> None:
    assert {CASES[case][0] for case in MOE_CASES} | ALONE == MIXTURES and len(MIXTURES) == 45
