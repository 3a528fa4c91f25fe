"""Transformer Engine's router functions (`transformer_engine.pytorch.router`): dense maps [..., E] of which experts
each token uses, and how much.

Our own models use `te_models.kernels.router` with indices [T, K] and a kernel; these are a few operations of
torch in float32. Of equal scores the lower expert wins. T tokens, E experts, K experts per token (topk).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.router.reference import top_k, within_groups
from te_models.suggestions import check_choice

from .arguments import takes_at_default

_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_EPS = 1e-20


@takes_at_default(
    routing_map_format="bytemap", topk_indices=None, qb_histogram=None, qb_bin_bounds=None, qb_histogram_mode=None
)
def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (probs, routing_map), both [..., E]: the weight of each expert in logits' dtype, 0 where it is not used,
    and whether it is used, bool.

    logits: [..., E]. score_function: "softmax" over all experts (use_pre_softmax) or over the chosen ones; "sigmoid";
    "sqrtsoftplus", `sqrt(log(1 + exp(x)))`; of the last two the chosen are divided by their sum if topk > 1.
    expert_bias: [E], added for the choice and not to the weights. num_groups, group_topk: choose among the best groups
    only, each valued by the sum of its topk / group_topk best. scaling_factor: multiplies the weights. Differentiable
    in logits. ValueError for an unknown name, impossible counts, and a bias of softmax.
    """
    _check(logits, topk, score_function)
    if expert_bias is not None and score_function == "softmax":
        raise ValueError("expert_bias is given with score_function 'softmax'; allowed: 'sigmoid', 'sqrtsoftplus'")
    after = score_function == "softmax" and not use_pre_softmax
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = exact if after else _scores(exact, score_function)
    with torch.no_grad():
        choice = scores if expert_bias is None else scores + expert_bias.to(scores.dtype)
        if group_topk:
            choice = _in_best_groups(choice, topk, num_groups, group_topk)
        indices = top_k(choice, topk)
    weights = scores.gather(-1, indices)
    if after:
        weights = weights.softmax(-1)
    elif score_function != "softmax" and topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _EPS)
    if scaling_factor:
        weights = weights * scaling_factor
    probs = torch.zeros_like(exact).scatter(-1, indices, weights).to(logits.dtype)
    return probs, _map(logits, indices)


@takes_at_default(routing_map_format="bytemap")
def fused_compute_score_for_moe_aux_loss(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """Return (routing_map, scores), both [..., E]: which topk experts have the largest scores, bool, and each token's
    scores of all experts, float32, for the load-balancing loss; sigmoid and sqrtsoftplus ones divided by their sum if
    topk > 1. logits: [..., E]. Differentiable. ValueError as above."""
    _check(logits, topk, score_function)
    scores = _scores(logits.to(torch.promote_types(logits.dtype, torch.float32)), score_function)
    if score_function != "softmax" and topk > 1:
        scores = scores / (scores.sum(-1, keepdim=True) + _EPS)
    with torch.no_grad():
        indices = top_k(scores, topk)
    return _map(logits, indices), scores


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """Return `coeff E / (topk total_num_tokens^2) sum_e (sum_t probs[t, e]) tokens_per_expert[e]`, a scalar in probs'
    dtype (arXiv 2101.03961, eq. 4-6). probs: [T, E]; tokens_per_expert: [E]; num_experts: E. Differentiable in probs;
    summed in float32. ValueError where tokens_per_expert is of others than probs' experts."""
    if tokens_per_expert.shape != probs.shape[-1:]:
        allowed = tuple(probs.shape[-1:])
        raise ValueError(f"tokens_per_expert has shape {tuple(tokens_per_expert.shape)}; allowed: {allowed}")
    exact = probs.to(torch.promote_types(probs.dtype, torch.float32))
    total = (exact.sum(0) * tokens_per_expert.to(exact.dtype)).sum()
    if isinstance(total_num_tokens, Tensor):
        total_num_tokens = total_num_tokens.to(exact.dtype)
    return (total * (num_experts * coeff / topk) / total_num_tokens / total_num_tokens).to(probs.dtype)


def _scores(logits: Tensor, score_function: str) -> Tensor:
    if score_function == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if score_function == "sigmoid" else F.softplus(logits).sqrt()


def _in_best_groups(choice: Tensor, topk: int, num_groups: int | None, group_topk: int) -> Tensor:
    experts = choice.shape[-1]
    if not num_groups or experts % num_groups or not 0 < group_topk <= num_groups or topk < group_topk:
        raise ValueError(
            f"num_groups is {num_groups} with group_topk {group_topk} and topk {topk}; allowed: a divisor of {experts} "
            "experts, at most so many best groups, and at least one expert of each"
        )
    if topk > experts // num_groups * group_topk:
        raise ValueError(f"topk is {topk}; allowed: at most {experts // num_groups * group_topk}, in the best groups")
    return within_groups(choice, num_groups, group_topk, topk // group_topk)


def _map(logits: Tensor, indices: Tensor) -> Tensor:
    return torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter(-1, indices, True)


def _check(logits: Tensor, topk: int, score_function: str) -> None:
    check_choice("score_function", score_function, _SCORES)
    if not 0 < topk <= logits.shape[-1]:
        raise ValueError(f"topk is {topk}; allowed: 1 to {logits.shape[-1]}, the number of experts")
