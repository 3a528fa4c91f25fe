"""Recurrent mixers of sequences that ranks share: a chunk changes the state that enters it by a linear map and adds its
own, so that ranks exchange maps and states, not tokens; convolutions, the last tokens of each chunk.

B batch, n ranks with two chunks each, R = 2 B rows of a chunk, C tokens of one, H heads, K and V channels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.chunks import wide
from te_models.kernels.documents import starts_of
from te_models.kernels.gated_delta import gated_delta_rule
from te_models.kernels.linear_attention import linear_attention
from te_models.kernels.short_convolution import short_convolution
from te_models.kernels.state_space import selective_scan, state_space_scan
from te_models.layers.distributed.context_parallel import ContextShard, gather_positions, own_positions


def rows_of_chunks(x: Tensor) -> Tensor:
    """Return x [B, 2 C, ...] of a rank's two chunks as rows [R, C, ...]."""
    return x.unflatten(1, (2, -1)).flatten(0, 1)


def tokens_of_chunks(x: Tensor) -> Tensor:
    """Return rows [R, C, ...] as [B, 2 C, ...]."""
    return x.unflatten(0, (-1, 2)).flatten(1, 2)


def own_documents(documents: Tensor | None, shard: ContextShard) -> Tensor | None:
    """Return the numbers of the documents of this rank's rows, [R, C]. documents: [B, S] of whole sequences."""
    return None if documents is None else rows_of_chunks(own_positions(documents, shard))


def entering_states(
    transition: Tensor,
    state: Tensor,
    applied: Callable[[Tensor, Tensor], Tensor],
    documents: Tensor | None,
    shard: ContextShard,
) -> Tensor:
    """Return the state before each row, [R, ...]. transition: [R, ...], what a row does to the state before it, by
    `applied`; state: [R, ...], behind a row whose first state is zero. documents: [B, S] of whole sequences."""
    maps, states = (gather_positions(x.unflatten(0, (-1, 2)), shard) for x in (transition, state))
    size = 0 if documents is None else documents.shape[1] // states.shape[1]
    before, found = torch.zeros_like(states[:, 0]), []
    for chunk in range(states.shape[1]):
        if documents is not None and chunk:
            same = documents[:, chunk * size] == documents[:, chunk * size - 1]
            before = torch.where(same.view(-1, *[1] * (before.dim() - 1)), before, 0)
        found.append(before)
        before = applied(maps[:, chunk], before) + states[:, chunk]
    return own_positions(torch.stack(found, 1), shard).flatten(0, 1)


def shared_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None, shard: ContextShard
) -> Tensor:
    """As `gated_delta_rule` of whole sequences, of this rank's tokens [B, 2 C, ...]. documents: of whole sequences.

    Zeros as values and unit vectors as a state, beside the others, give what a chunk makes of any state.
    """
    dtype, values, keys, heads = wide(v), v.shape[3], k.shape[3], v.shape[2]
    q, k, g, beta = (rows_of_chunks(x) for x in (q, k, g, beta))
    both = rows_of_chunks(F.pad(v.to(dtype), (0, keys)))
    unit = F.pad(torch.eye(keys, dtype=dtype, device=v.device), (values, 0)).expand(both.shape[0], heads, -1, -1)
    own = own_documents(documents, shard)
    out, state = gated_delta_rule(q, k, both, g, beta, initial_state=unit, documents=own)
    before = entering_states(state[..., values:], state[..., :values], torch.matmul, documents, shard)
    y = out[..., :values] + torch.einsum("rchk,rhkv->rchv", out[..., values:], before)
    return tokens_of_chunks(y).to(v.dtype)


def shared_state_space_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    documents: Tensor | None,
    shard: ContextShard,
) -> Tensor:
    """As `state_space_scan` of whole sequences, of this rank's tokens [B, 2 C, ...]. documents: of whole sequences."""
    dtype = wide(x)
    rows = [rows_of_chunks(t) for t in (x.to(dtype), dt, B.to(dtype), C.to(dtype))]
    own = own_documents(documents, shard)
    y, state = state_space_scan(rows[0], rows[1], A, rows[2], rows[3], D, documents=own)
    y = y + _of_entering_states(rows[3], rows[1] * A, state.mT, documents, own, shard)
    return tokens_of_chunks(y).to(x.dtype)


def shared_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, documents: Tensor | None, shard: ContextShard
) -> Tensor:
    """As `linear_attention` of whole sequences, of this rank's tokens [B, 2 C, ...]. documents: of whole sequences."""
    dtype = wide(v)
    q, k, rows, g = (rows_of_chunks(x.to(dtype)) for x in (q, k, v, g))
    own = own_documents(documents, shard)
    y, state = linear_attention(q, k, rows, g, documents=own)
    return tokens_of_chunks(y + _of_entering_states(q, g, state, documents, own, shard)).to(v.dtype)


def shared_selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, documents: Tensor | None, shard: ContextShard
) -> Tensor:
    """As `selective_scan` of whole sequences, of this rank's tokens [B, 2 C, ...]. documents: of whole sequences."""
    dtype = wide(x)
    value, dt, B, C = (rows_of_chunks(t.to(dtype)) for t in (x, dt, B, C))
    own = own_documents(documents, shard)
    y, state = selective_scan(value, dt, A, B, C, D, documents=own)
    passed = _passed(dt[..., None] * A, own)
    before = entering_states(passed[:, -1], state, torch.mul, documents, shard)
    y = y + (passed * before[:, None] * C[:, :, None]).sum(-1)
    return tokens_of_chunks(y).to(x.dtype)


def _of_entering_states(
    q: Tensor, g: Tensor, state: Tensor, documents: Tensor | None, own: Tensor | None, shard: ContextShard
) -> Tensor:
    """Return what queries read of the states before their rows, [R, C, H, V]. q: [R, C, Hk, K]; g: logs of the decays,
    [R, C, H]; state: [R, H, K, V], behind a row whose first state is zero. own: documents of the rows."""
    passed = _passed(g, own)
    before = entering_states(passed[:, -1], state, lambda a, s: a[..., None, None] * s, documents, shard)
    each = q.repeat_interleave(g.shape[2] // q.shape[2], 2)
    return torch.einsum("rchk,rhkv->rchv", each, before) * passed[..., None]


def _passed(g: Tensor, own: Tensor | None) -> Tensor:
    """Return what is left of the state before a row behind each of its tokens, [R, C, ...], by the logs of the decays;
    nothing where a document has begun since. own: documents of the rows."""
    passed, starts = g.cumsum(1).exp(), starts_of(own)
    if starts is None:
        return passed
    return torch.where((starts.cumsum(1) == 0).view(*g.shape[:2], *[1] * (g.dim() - 2)), passed, 0)


def shared_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    documents: Tensor | None,
    shard: ContextShard,
) -> Tensor:
    """As `short_convolution` of whole sequences, of this rank's tokens x [B, 2 C, D]. documents: of whole sequences.
    Raises ValueError for chunks of fewer tokens than the convolution reads before its own."""
    halo, rows = weight.shape[1] - 1, rows_of_chunks(x)
    if rows.shape[1] < halo:
        raise ValueError(
            f"each of the {2 * shard.ranks} chunks of a sequence that ranks share has {rows.shape[1]} tokens; allowed: "
            f"at least {halo}, which a convolution of width {weight.shape[1]} reads"
        )
    last = rows[:, rows.shape[1] - halo :].unflatten(0, (-1, 2))
    behind = gather_positions(last, shard)
    before = torch.cat([torch.zeros_like(behind[:, :1]), behind[:, :-1]], 1)
    if documents is not None:
        numbers = documents.unflatten(1, (2 * shard.ranks, -1))
        earlier = F.pad(numbers[:, :-1, numbers.shape[2] - halo :], (0, 0, 1, 0))
        before = torch.where((earlier == numbers[:, :, :1])[..., None], before, 0)
    first = own_positions(before, shard).flatten(0, 1)
    own = own_documents(documents, shard)
    y, _ = short_convolution(rows, weight, bias, activation=activation, initial_state=first.mT, documents=own)
    return tokens_of_chunks(y)
