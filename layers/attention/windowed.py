"""Attention in a sliding window (arXiv 2004.05150) block by block, without a mask or scores of all queries and keys,
where our flash attention on a CPU does not serve: hidden keys, dropout, other dtypes and channels.

Queries in blocks of b positions, no fewer than the window reaches, see their own block and the one before it. So blocks
are rows of a batch, of which each has b queries and b + reach keys: the work and the memory of S queries are S (b +
reach), and not S^2. What computes a block is the caller's: torch's kernels, soft-capped scores, sinks.

B batch, S queries, of the last positions of L keys; N query heads, G key/value heads, D channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.packed_attention import document_runs, sees_own_document

FEWEST = 64
"""Queries of a block: with fewer, a window of few positions would make too many blocks."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of queries [R, b, N, D], keys and values [R, k, G, D] and the bool mask [1 or R, 1, b, k] -> [R, b, N * Dv]."""


def block_length(window: int) -> int:
    """Return b, for a window of so many positions, its own included."""
    return max(window, FEWEST)


def saves(window: int, queries: int, keys: int) -> bool:
    """Whether blocks have less to do than all queries with all keys have, and can be made: the keys begin where the
    queries do, or a block before."""
    block = block_length(window)
    return queries > 3 * block and (keys == queries or keys >= queries + block)


def attend_in_window(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    *,
    documents: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Return attention of query [B, S, N, D] over the last `window` of key [B, L, G, D] and value [B, L, G, Dv], each
    query's own position included: [B, S, N * Dv]. A query that sees no key gets what `attend` gives it: zeros.

    documents: int64 [B, L], negative for padding: a query sees keys of its own document. hidden: bool [B, L], True
    where nobody sees a key (or [1, L]). Where blocks save nothing it is one call with a mask [B or 1, 1, S, L].
    """
    length, keys, reach = query.shape[1], key.shape[1], window - 1
    hidden = None if hidden is None else hidden.expand(query.shape[0], -1)
    seen = partial(_visible, reach=reach, device=query.device)
    if not saves(window, length, keys):
        return attend(query, key, value, seen(length, keys, documents, hidden))
    block, found = block_length(window), []
    if keys == length:  # the first block has none before it
        q, k, v = (t[:, :block] for t in (query, key, value))
        own = (None if t is None else t[:, :block] for t in (documents, hidden))
        found.append(attend(q, k, v, seen(block, block, *own)))
        query, begin = query[:, block:], 0
    else:
        begin = keys - length - block
    rest = query.shape[1]
    count = -(-rest // block)
    missing = count * block - rest

    def with_block_before(t: Tensor, filling: Any = 0) -> Tensor:
        return _overlapping(_with_rows(t[:, begin:], missing, filling), block, reach)

    numbers = None if documents is None else with_block_before(documents, -1)
    nobody = None if hidden is None else with_block_before(hidden, True)
    rows = _with_rows(query, missing).reshape(-1, block, *query.shape[2:])
    mask = seen(block, reach + block, numbers, nobody)
    y = attend(rows, with_block_before(key), with_block_before(value), mask)
    found.append(y.reshape(query.shape[0], count * block, -1)[:, :rest])
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _visible(
    queries: int, keys: int, documents: Tensor | None, hidden: Tensor | None, *, reach: int, device: torch.device
) -> Tensor:
    """Return the mask [1 or R, 1, queries, keys] of queries at the last of the keys; documents, hidden: [R, keys]."""
    distance = keys - queries + torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    visible = ((distance >= 0) & (distance <= reach))[None]
    if documents is not None:
        runs = document_runs(documents)
        visible = visible & sees_own_document(runs, runs[:, keys - queries :])
    if hidden is not None:
        visible = visible & ~hidden[:, None]
    return visible[:, None]


def _with_rows(x: Tensor, missing: int, value: Any = 0) -> Tensor:
    """Return x [B, S, ...] followed by this many rows of one value."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing), value=value) if missing else x


def _overlapping(x: Tensor, block: int, reach: int) -> Tensor:
    """Return of x [B, (count + 1) block, ...] each block but the first, behind the last `reach` rows of the one before
    it: [B * count, reach + block, ...]."""
    blocks = x.unflatten(1, (-1, block))
    return torch.cat((blocks[:, :-1, block - reach :], blocks[:, 1:]), 2).flatten(0, 1)
