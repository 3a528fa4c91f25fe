"""Softmax attention of sequences that ranks share, whose keys and values go round a ring (arXiv 2310.01889).

Each rank attends from its queries to the keys that it has, while these are on their way to the next rank, and puts what
it finds of each part together by the logs of the sums of exponentials: in float32, or wider. The backward pass sends
keys and values round again, and their gradients behind them. Scores exist a block of queries at a time.

B batch, S queries of a rank, of its two chunks; C positions of a chunk; N query heads, G key/value heads, D channels.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.packed_attention import document_runs, sees_own_document
from te_models.kernels.torch_versions import own_result
from te_models.kernels.without_autocast import without_autocast

from ..collectives import sent_on, waited
from ..distributed.context_parallel import ContextShard

_ROWS = 1024
"""Queries whose scores exist at a time, at most."""


class RingRule(NamedTuple):
    """Which keys a query sees, and what is done to its scores. before: how many keys before its own it sees, -1: all.
    causal: none behind its own."""

    shard: ContextShard
    scale: float
    softcap: float | None
    before: int
    causal: bool


class Hidden(NamedTuple):
    """mask: bool [B, 1, 1 or S, whole length], True where a key is hidden; documents: int64 [B, whole length], negative
    for padding: neighbours of the same number are a document, and a query sees keys of its own."""

    mask: Tensor | None = None
    documents: Tensor | None = None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Hidden, sink: Tensor | None, slopes: Tensor | None, rule: RingRule
) -> Tensor:
    """Return attention of q [B, S, N, D] over the keys k [B, S, G, D] and values v [B, S, G, Dv] of all ranks,
    [B, S, N, Dv].

    sink: one extra logit of each head, [N]. slopes: of each head, [N]; scores are lower by them times the distance of
    the key from the last one. A query that sees no key gets zeros. Collective over the ranks.
    """
    runs = None if hidden.documents is None else document_runs(hidden.documents)
    return _Ring.apply(q, k, v, sink, hidden.mask, runs, slopes, rule)


class _Block(NamedTuple):
    """Queries and keys whose scores are computed at once. row: its number among the blocks of queries; rows, keys:
    where they lie in what a rank has; first_row, first_key: their positions in the sequence."""

    row: int
    rows: slice
    keys: slice
    first_row: int
    first_key: int


def _blocks(rule: RingRule, source: int, size: int) -> Iterator[_Block]:
    """Yield the blocks of this rank's queries and the keys of rank `source`; size: C."""
    length, step = 2 * rule.shard.ranks * size, min(size, _ROWS)
    mine, theirs = rule.shard.chunks(length), rule.shard._replace(rank=source).chunks(length)
    places = [(number * size, begin) for number, (begin, _) in enumerate(mine)]
    starts = [(offset + at, begin + at) for offset, begin in places for at in range(0, size, step)]
    for row, (offset, begin) in enumerate(starts):
        rows = min(step, size - offset % size)
        for number, (first, end) in enumerate(theirs):
            low = first if rule.before < 0 else max(first, begin - rule.before)
            high = min(end, begin + rows) if rule.causal else end
            if low < high:
                at = number * size + low - first
                yield _Block(row, slice(offset, offset + rows), slice(at, at + high - low), begin, low)


def _unseen(block: _Block, rule: RingRule, hidden: Hidden, device: torch.device) -> Tensor | None:
    """Return where a query of a block does not see a key, broadcastable to [B, 1, rows, keys]; None: nowhere."""
    rows, keys = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    first = block.first_row - block.first_key
    found: list[Tensor] = []
    distance = first + torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device)
    if rule.causal and first < keys - 1:
        found.append(distance < 0)
    if rule.before >= 0 and first + rows - 1 > rule.before:
        found.append(distance > rule.before)
    where = slice(block.first_key, block.first_key + keys)
    if hidden.mask is not None:
        mask = hidden.mask if hidden.mask.shape[2] == 1 else hidden.mask[:, :, block.rows]
        found.append(mask[..., where])
    if hidden.documents is not None:
        queries = hidden.documents[:, block.first_row : block.first_row + rows]
        found.append(~sees_own_document(hidden.documents[:, where], queries)[:, None])
    unseen = None
    for condition in found:
        unseen = condition if unseen is None else unseen | condition
    return unseen


def _scores(
    q: Tensor, k: Tensor, block: _Block, rule: RingRule, hidden: Hidden, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the scores of a block, [B, N, rows, keys], as they are and with -inf where a key is not seen. q: [B, N, S,
    D]; k: [B, G, S, D]."""
    queries, keys = q[:, :, block.rows], k[:, :, block.keys]
    scores = (_folded(queries, keys) @ keys.mT).view(*queries.shape[:3], keys.shape[2]) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    seen = scores
    if slopes is not None:
        last = 2 * rule.shard.ranks * (q.shape[2] // 2) - 1
        position = torch.arange(block.first_key - last, block.first_key - last + keys.shape[2], device=q.device)
        seen = seen + position * slopes.to(scores.dtype)[:, None, None]
    unseen = _unseen(block, rule, hidden, q.device)
    return scores, seen if unseen is None else seen.masked_fill(unseen, float("-inf"))


def _folded(x: Tensor, keys: Tensor) -> Tensor:
    """[B, N, rows, C] -> [B, G, N / G rows, C]: heads that share a head of keys [B, G, ...] together."""
    return x.reshape(x.shape[0], keys.shape[1], -1, x.shape[3])


def _wide(x: Tensor) -> Tensor:
    """[B, S, heads, D] -> [B, heads, S, D], in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        mask: Tensor | None,
        documents: Tensor | None,
        slopes: Tensor | None,
        rule: RingRule,
    ) -> Tensor:
        with without_autocast(q):
            y, lse = _forward(q, k, v, sink, Hidden(mask, documents), slopes, rule)
        ctx.rule = rule
        ctx.save_for_backward(q, k, v, y, lse, sink, mask, documents, slopes)
        return own_result(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse, sink, mask, documents, slopes = ctx.saved_tensors
        with without_autocast(dy):
            found = _backward(dy, q, k, v, y, lse, sink, Hidden(mask, documents), slopes, ctx.rule)
        return *found, None, None, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, hidden: Hidden, slopes: Tensor | None, rule: RingRule
) -> tuple[Tensor, Tensor]:
    """Return the result [B, S, N, Dv], and the logs of the sums [B, N, S, 1]."""
    (rank, ranks), size, group = rule.shard[:2], q.shape[1] // 2, rule.shard.group
    channels, queries = k.shape[-1], _wide(q)
    start = queries.new_full((*queries.shape[:3], 1), float("-inf"))
    if sink is not None:
        start = start.copy_(sink.to(queries.dtype)[:, None, None].expand_as(start))
    places = {block.row: block.rows for block in _blocks(rule._replace(before=-1), rank, size)}
    logs = [start[:, :, rows] for rows in places.values()]
    sums = [queries.new_zeros(*log.shape[:3], v.shape[-1]) for log in logs]
    passed = torch.cat((k, v), -1)
    for step in range(ranks):
        arriving = sent_on(passed, group, rank, ranks) if step < ranks - 1 else None
        keys, values = _wide(passed[..., :channels]), _wide(passed[..., channels:])
        for block in _blocks(rule, (rank - step) % ranks, size):
            _, seen = _scores(queries, keys, block, rule, hidden, slopes)
            before = logs[block.row]
            log = torch.logaddexp(before, seen.logsumexp(-1, keepdim=True))
            bound = log.clamp(min=torch.finfo(log.dtype).min)  # of a query that has seen no key
            part = _folded((seen - bound).exp(), keys) @ values[:, :, block.keys]
            sums[block.row] = sums[block.row] * (before - bound).exp() + part.view_as(sums[block.row])
            logs[block.row] = log
        if arriving is not None:
            passed = waited(arriving)
    return torch.cat(sums, 2).to(v.dtype).transpose(1, 2), torch.cat(logs, 2)


def _backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    hidden: Hidden,
    slopes: Tensor | None,
    rule: RingRule,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the sink."""
    (rank, ranks), size, group = rule.shard[:2], q.shape[1] // 2, rule.shard.group
    channels, queries, dout = k.shape[-1], _wide(q), _wide(dy)
    delta = (dout * _wide(y)).sum(-1, keepdim=True)
    bound = lse.clamp(min=torch.finfo(lse.dtype).min)
    dsink = None
    if sink is not None:
        of_sink = (sink.to(lse.dtype)[:, None, None] - bound).exp()
        dsink = -(of_sink * delta).sum((0, 2, 3)).to(sink.dtype)
    dq = torch.zeros_like(queries)
    passed, gradient = torch.cat((k, v), -1), None
    for step in range(ranks):
        arriving = sent_on(passed, group, rank, ranks) if step < ranks - 1 else None
        keys, values = _wide(passed[..., :channels]), _wide(passed[..., channels:])
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        for block in _blocks(rule, (rank - step) % ranks, size):
            rows, where = block.rows, block.keys
            scores, seen = _scores(queries, keys, block, rule, hidden, slopes)
            p = (seen - bound[:, :, rows]).exp()
            its = _folded(dout[:, :, rows], keys)
            dp = (its @ values[:, :, where].mT).view_as(p)
            ds = p * (dp - delta[:, :, rows])
            if rule.softcap is not None:
                ds = ds * (1 - (scores / rule.softcap).square())
            ds, p = _folded(ds * rule.scale, keys), _folded(p, keys)
            dq[:, :, rows] += (ds @ keys[:, :, where]).view_as(dq[:, :, rows])
            dk[:, :, where] += ds.mT @ _folded(queries[:, :, rows], keys)
            dv[:, :, where] += p.mT @ its
        own = torch.cat((dk, dv), -1)
        # what the rank before has found of these keys, which it had a step ago, goes on with what this one found
        gradient = sent_on(own if gradient is None else own + waited(gradient), group, rank, ranks)
        if arriving is not None:
            passed = waited(arriving)
    assert gradient is not None, "there are ranks"
    dk, dv = waited(gradient).transpose(1, 2).split((channels, v.shape[-1]), -1)
    return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink
