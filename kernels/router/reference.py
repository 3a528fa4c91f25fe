"""Top-k routing of tokens to experts, in float32.

T tokens, E experts, K experts per token, n groups of E/n experts.

Families differ in the score (softmax, or sigmoid as in DeepSeek-V3), in what selects (scores, scores plus a
load-balancing bias, scores within the best groups) and in how the k weights are normalised; `router_topk` covers them.
Ties: of equal scores the lower expert index wins, on every device and in every run.
"""

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_models.suggestions import check_choice

from ..compiling import compiling

_FEW_TOKENS = 32  # up to which one sort is faster than a dozen passes: what a batch has when it generates


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest entries of each row, largest first, ties to the lower index: [T, k]."""
    left = scores.clamp(min=torch.finfo(scores.dtype).min)  # so that -inf marks taken entries only
    if not compiling() and scores.shape[0] <= _FEW_TOKENS:
        return left.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    columns = torch.arange(scores.shape[-1], device=scores.device)
    chosen = []
    for _ in range(k):
        best = left.argmax(dim=-1)
        chosen.append(best)
        left = torch.where(columns == best[..., None], -torch.inf, left)
    return torch.stack(chosen, dim=-1)


def within_groups(scores: Tensor, num_groups: int, topk_groups: int, summed: int) -> Tensor:
    """Return scores with every expert outside the token's best groups at -inf (DeepSeek-V2/V3). summed: how many of the
    best scores of a group make its value."""
    grouped = scores.unflatten(-1, (num_groups, -1))
    if summed == 1:
        value = grouped.amax(dim=-1)
    else:
        value = grouped.gather(-1, top_k(grouped, min(summed, grouped.shape[-1]))).sum(dim=-1)
    best = top_k(value, topk_groups)
    groups = torch.arange(num_groups, device=scores.device)
    selected = (best[..., None] == groups).any(dim=-2)
    return torch.where(selected[..., None], grouped, -torch.inf).flatten(-2)


_SCORES, _GROUP_SCORES = ("softmax", "sigmoid", "sqrtsoftplus"), ("max", "top2_sum")


def check_router(
    num_experts: int, topk: int, score: str, num_groups: int | None, topk_groups: int | None, group_score: str
) -> None:
    """Raise ValueError for an unknown name or an impossible count; see `router_topk`."""
    if score not in _SCORES or group_score not in _GROUP_SCORES:
        check_choice("score", score, _SCORES)
        check_choice("group_score", group_score, _GROUP_SCORES)
    if (num_groups is None) != (topk_groups is None):
        raise ValueError(f"topk_groups is {topk_groups}; allowed: a count with num_groups, None without")
    available = num_experts
    if num_groups is not None and topk_groups is not None:
        if num_groups < 1 or num_experts % num_groups:
            raise ValueError(f"num_groups is {num_groups}; allowed: a divisor of {num_experts}, the number of experts")
        if not 0 < topk_groups <= num_groups:
            raise ValueError(f"topk_groups is {topk_groups}; allowed: 1 to {num_groups}, the number of groups")
        available = num_experts // num_groups * topk_groups
    if not 0 < topk <= available:
        raise ValueError(f"topk is {topk}; allowed: 1 to {available}, the number of experts to choose from")


def router_topk(
    logits: Tensor,
    topk: int,
    *,
    score: str = "softmax",
    score_after_topk: bool = False,
    expert_bias: Tensor | None = None,
    normalize: bool = True,
    normalize_eps: float = 0.0,
    scaling_factor: float = 1.0,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    group_score: str = "top2_sum",
) -> tuple[Tensor, Tensor]:
    """Choose topk experts per token. Returns (weights [T, K] float32, expert indices [T, K] int64), best first.

    logits: [T, E]; the options: see the public `router_topk`.
    """
    check_router(logits.shape[-1], topk, score, num_groups, topk_groups, group_score)
    logits = logits.float()
    scores = logits if score_after_topk else _score(logits, score)
    with torch.no_grad():
        choice = scores if expert_bias is None else scores + expert_bias.float()
        if num_groups is not None and topk_groups is not None:
            choice = within_groups(choice, num_groups, topk_groups, 1 if group_score == "max" else 2)
        indices = top_k(choice, topk)
    weights = scores.gather(-1, indices)
    if score_after_topk:
        weights = _score(weights, score)
    return _scaled(weights, normalize, normalize_eps, scaling_factor), indices


def _scaled(weights: Tensor, normalize: bool, normalize_eps: float, scaling_factor: float) -> Tensor:
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + normalize_eps)
    # a factor is a variable of the graph under dynamic=True
    return weights if statically_known_true(scaling_factor == 1.0) else weights * scaling_factor


def _score(logits: Tensor, score: str) -> Tensor:
    if score == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt()
    return torch.softmax(logits, dim=-1) if score == "softmax" else torch.sigmoid(logits)


def weights_of(
    logits: Tensor,
    indices: Tensor,
    *,
    score: str = "softmax",
    score_after_topk: bool = False,
    normalize: bool = True,
    normalize_eps: float = 0.0,
    scaling_factor: float = 1.0,
) -> Tensor:
    """Return the weights [T, K] float32 of experts that were chosen otherwise, indices [T, K]; options as for
    `router_topk`, whose weights these are, bit for bit, for the experts that it chooses."""
    logits = logits.float()
    if score_after_topk:
        weights = _score(logits.gather(-1, indices), score)
    else:
        weights = _score(logits, score).gather(-1, indices)
    return _scaled(weights, normalize, normalize_eps, scaling_factor)


def router_probabilities(logits: Tensor, score: str = "softmax") -> Tensor:
    """Return each token's distribution over all experts, [T, E] float32, for the load-balancing loss.

    Sigmoid scores are divided by their sum, as DeepSeek-V3's balance loss does (arXiv 2412.19437, eq. 18-19).
    """
    scores = _score(logits.float(), score)
    return scores if score == "softmax" else scores / scores.sum(dim=-1, keepdim=True)


def load_balancing_loss(probabilities: Tensor, indices: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return `E * sum_e f_e P_e`: 1 when tokens spread evenly, up to E when all use the same experts.

    f_e is the fraction of choices that went to expert e (sums to 1), P_e the mean probability of e (arXiv 2101.03961,
    eq. 4-6; for K > 1 the fraction counts all K choices). probabilities: [T, E]; indices: [T, K]; mask: [T] bool,
    True where a token counts (None: all). Float32 scalar; the gradient flows through the probabilities. No token: 0.
    With a dimension B before these, the mean over the B sequences that have tokens (DeepSeek-V2, arXiv 2405.04434,
    eq. 23-25, but for the factor K).
    """
    num_experts = probabilities.shape[-1]
    experts = torch.arange(num_experts, device=indices.device)
    hits = (indices[..., None] == experts).sum(dim=-2, dtype=torch.float32)
    if mask is not None:
        hits = hits * mask.float()[..., None]
    fraction = hits.sum(dim=-2) / (_tokens(probabilities, mask)[..., None] * indices.shape[-1])
    losses = num_experts * (fraction * mean_probabilities(probabilities, mask)).sum(dim=-1)
    if losses.dim() == 0:
        return losses
    some = torch.ones_like(losses) if mask is None else mask.any(dim=-1).float()
    return losses.sum() / some.sum().clamp(min=1)


def mean_probabilities(probabilities: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over tokens, [..., T, E] -> [..., E], of those where mask, [..., T] bool, is True (None: all)."""
    tokens = _tokens(probabilities, mask)[..., None]
    if mask is not None:
        probabilities = probabilities * mask.float()[..., None]
    return probabilities.sum(dim=-2) / tokens


def _tokens(probabilities: Tensor, mask: Tensor | None) -> Tensor:
    """Return how many tokens count, [..., T, E] -> [...] float32, at least 1."""
    if mask is not None:
        return mask.float().sum(dim=-1).clamp(min=1)
    shape = probabilities.shape[:-2]
    return torch.full(shape, probabilities.shape[-2], dtype=torch.float32, device=probabilities.device).clamp(min=1)


def joint_shares(logits: Tensor, topk: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return how many choices went to each expert per token (they sum to K) and the mean probability of each, both [E]
    float32: what a layer adds to transformers' load-balancing loss.

    Choices and probabilities come from a softmax of the logits, whatever else the router does: another score,
    a bias, groups. logits: [T, E]; mask: [T] bool, True where a token counts (None: all). No token: 0.
    """
    probabilities = router_probabilities(logits)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(topk, dim=-1).indices, 1.0)
    return mean_probabilities(chosen, mask), mean_probabilities(probabilities, mask)


def router_z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of `logsumexp(logits)^2` (ST-MoE, arXiv 2202.08906, eq. 5), float32 scalar.

    logits: [T, E]; mask: [T] bool, True where a token counts (None: all). No token: 0.
    """
    z = torch.logsumexp(logits.float(), dim=-1).square()
    if mask is None:
        return z.sum() / torch.full((), z.shape[0], dtype=torch.float32, device=z.device).clamp(min=1)
    counted = mask.float()
    return (z * counted).sum() / counted.sum().clamp(min=1)
