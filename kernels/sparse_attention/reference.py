"""The definition of sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1), with all scores written out.

B batch, S queries, L keys, H index heads, I channels of an index head, N query heads, D channels, Dv value channels.
Queries are of the last of the keys. hidden: bool [B, S, L], true where a query does not see a key.
"""

import torch
from torch import Tensor


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """q: [B, S, H, I]; k: [B, L, I]; weights: [B, S, H] -> sum_h w_h ReLU(q_h . k), [B, S, L]."""
    return (torch.einsum("bshi,bli->bshl", q, k).relu() * weights[..., None]).sum(2)


def selected(scores: Tensor, hidden: Tensor, topk: int) -> Tensor:
    """Return which keys each query sees, bool [B, S, L]: the `topk` best of those that are not hidden; of equal ones
    the earlier."""
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    return torch.zeros_like(hidden).scatter(-1, order, True) & ~hidden


def probabilities(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q: [B, S, N, D]; k: [B, L, N, D]; seen: bool [B, S, L] -> [B, N, S, L], zeros of a query that sees nothing."""
    scores = scale * torch.einsum("bsnd,blnd->bnsl", q, k)
    return torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), -1).nan_to_num(0.0)


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """v: [B, L, N, Dv] -> [B, S, N, Dv]. Other arguments: see `probabilities`."""
    return torch.einsum("bnsl,blne->bsne", probabilities(q, k, seen, scale), v)


def indexer_loss(scores: Tensor, q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return the mean over the queries that see a key of KL(p || softmax(scores)): p is the probability of each key,
    summed over heads and divided by its sum, without gradient. Arguments: see `probabilities`; scores: [B, S, L]."""
    target = probabilities(q, k, seen, scale).sum(1).detach()
    target = target / target.sum(-1, keepdim=True)
    found = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
    terms = torch.where(seen, torch.xlogy(target, target) - target * found.masked_fill(~seen, 0.0), 0.0)
    return terms.sum() / seen.any(-1).sum().clamp(min=1)
