"""Sparse attention that chooses pools of tokens: as many neighbours of a text have one index key together (GLM-5).

B batch, S queries, L keys, I channels of an index head, P tokens of a pool.

A pool is represented where its last token is, so that what a query does not see it does not choose, as with one key for
each token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.packed_attention import first_positions
from te_models.kernels.sparse_attention import select_keys


def choose_pools(bias: Tensor, q: Tensor, k: Tensor, weights: Tensor, pools: int, hidden: Tensor | None) -> Tensor:
    """Return the tokens that each query sees, int32 [B, S, pools P + P - 1], -1 for none: the tokens of the best pools,
    and those behind the last whole pool. bias: [P, I]; k: [B, L, 2 I], each token's key and the logits of its weight in
    a pool; q, weights and hidden: as of `select_keys`."""
    size, (keys, gates), length = bias.shape[0], k.chunk(2, -1), k.shape[1]
    position = torch.arange(length, device=k.device)
    inside = position - text_starts(hidden, position) + 1
    ends = select_keys(q, pooled_keys(keys, gates, bias), weights, pools, hidden, (inside > 0) & (inside % size == 0))
    steps = torch.arange(size, device=k.device)
    tokens = torch.where(ends[..., None] < 0, -1, ends[..., None] - steps).flatten(-2)
    own = position[length - q.shape[1] :].expand(k.shape[0], -1)
    if q.shape[1] == 1 and hidden is not None and hidden.dtype == torch.bool:
        own = length - 1 - (~hidden).flip(-1).long().argmax(-1)  # keys may be slots of a cache that is not full
    behind = inside.expand(k.shape[0], -1).gather(1, own).clamp(min=0) % size
    tail = own[..., None] - behind[..., None] + 1 + steps[:-1]
    tail = torch.where(steps[:-1] < behind[..., None], tail, -1)
    return torch.cat((tokens.to(torch.int32), tail.to(torch.int32)), -1)


def pooled_keys(keys: Tensor, gates: Tensor, bias: Tensor) -> Tensor:
    """Return the key of the P tokens up to each one, [B, L, I]: their sum with weights that are, in each channel, a
    softmax of gates + bias. keys, gates: [B, L, I]; bias: [P, I], of the first token of a pool first."""
    size, dtype = bias.shape[0], torch.promote_types(keys.dtype, torch.float32)
    highest = keys.new_full(keys.shape, -torch.inf, dtype=dtype)
    total, found = torch.zeros_like(highest), torch.zeros_like(highest)
    for back in range(size):
        key, gate = (F.pad(t, (0, 0, back, 0))[:, : keys.shape[1]].to(dtype) for t in (keys, gates))
        logits = gate + bias[size - 1 - back].to(dtype)
        higher = torch.maximum(highest, logits)
        before, weight = (highest - higher).exp(), (logits - higher).exp()
        total, found, highest = total * before + weight, found * before + weight * key, higher
    return (found / total).to(keys.dtype)


def text_starts(hidden: Tensor | None, position: Tensor) -> Tensor:
    """Return where the text of each key begins, [B or 1, L]. hidden: as of `select_keys`; position: arange(L)."""
    if hidden is None:
        return torch.zeros_like(position)[None]
    if hidden.dtype != torch.bool:
        return first_positions(hidden)
    if hidden.shape[1] not in (1, position.shape[0]):
        raise ValueError(
            f"keys are hidden from {hidden.shape[1]} queries one by one, of {position.shape[0]} keys whose index keys "
            "are pooled; allowed: from all alike, or documents in a call that begins with them"
        )
    return (~hidden).long().argmax(-1).expand(-1, position.shape[0])
