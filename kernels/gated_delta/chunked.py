"""The gated delta rule in chunks (arXiv 2406.06484, section 3; with decay: arXiv 2412.06464, section 3.3).

Within a chunk, what all tokens write solves a triangular system; from chunk to chunk a state goes on. With G the sum of
g within the chunk, S the state before it, and P_ij = exp(G_i - G_j) where j comes before i:
    (I + tril(beta k k^T P, -1)) u = beta v - beta exp(G) k S;   out = exp(G) q S + tril(q k^T P) u
    S' = exp(G_C) S + (exp(G_C - G) k)^T u
Every exponent is 0 or less, so that nothing overflows.

N chunks, B batch, Hk heads of q and k, R heads of v that share one, C tokens of a chunk, K and V channels.
"""

from typing import Any

import torch
from torch import Tensor

from ..chunks import CHUNK, Marks, chunks_of, finite_decay, join_chunks, marks_of, masked, wide
from .states import delta_states

_DIRECT = 8
"""Tokens of a block in which every pair is multiplied separately; between blocks, matrix products."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, T, H, V] and the states behind chunks [N, B, H, K, V]. Arguments: as of the definition; T >= 1.

    starts: [B, T] bool, where a state of zeros begins.
    """
    dtype, (batch, tokens, heads, V), (key_heads, K) = wide(q), v.shape, k.shape[2:]
    marks, shared = marks_of(starts, q.device), heads // key_heads
    more: list[Any] = [x if x is None or x.dim() == 2 else x.unsqueeze(2) for x in marks]  # a dimension for R
    marks = Marks(*more)
    if g.dim() == 4 and shared > 1:
        q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
        key_heads, shared = heads, 1
    q, k = (chunks_of(x.to(dtype)).unsqueeze(3) for x in (q, k))
    v, g, beta = (chunks_of(x.to(dtype)).unflatten(2, (key_heads, shared)) for x in (v, g, beta))
    total = finite_decay(g).cumsum(4)
    if g.dim() == 6:
        keys, queries = products(k, k, total), products(q, k, total)
        keys, queries = (masked(x, marks.sees) for x in (keys, queries))
    else:
        decay = torch.where(marks.sees, total[..., :, None] - total[..., None, :], float("-inf")).exp()
        keys, queries = (k @ k.mT) * decay, (q @ k.mT) * decay
        total = total[..., None]
    beta, last = beta[..., None], total[..., -1:, :]
    entered, left = total.exp(), (last - total).exp()
    if marks.enters is not None and marks.leaves is not None:
        entered, left = masked(entered, marks.enters[..., None]), masked(left, marks.leaves[..., None])
    written = torch.cat([beta * v, beta * entered * k], -1)
    u = torch.linalg.solve_triangular((beta * keys).tril(-1), written, upper=False, unitriangular=True)
    passed = masked(last.squeeze(-2).exp(), None if marks.passes is None else marks.passes[..., None])
    if initial_state is None:
        initial_state = v.new_zeros(batch, heads, K, V)
    chunks, rows = q.shape[0], batch * heads
    u, w = u.reshape(chunks, rows, CHUNK, V + K).split([V, K], -1)
    state = initial_state.to(dtype).reshape(rows, K, V)
    k, passed = (left * k).reshape(chunks, rows, CHUNK, K), passed.reshape(chunks, rows, -1)
    states, values = delta_states(w, u, k, passed, state)
    before = torch.cat([state[None], states[:-1]])
    out = (scale * entered * q).reshape(chunks, rows, CHUNK, K) @ before
    out = out + (scale * queries).reshape(chunks, rows, CHUNK, CHUNK) @ values
    return join_chunks(out.view(chunks, batch, heads, CHUNK, V), tokens), states.view(chunks, batch, heads, K, V)


def products(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """Return the lower triangle of sum_c a_ic b_jc exp(total_ic - total_jc), [..., C, C]; zeros above it.

    a, b, total: [..., C, K], total falling along C. Blocks along the diagonal are written out; of two neighbours, all
    decay passes the last token of the first, and splits there into two factors of at most 1.
    """
    size = a.shape[-2]
    first, second, sums = (x.unflatten(-2, (size // _DIRECT, _DIRECT)) for x in (a, b, total))
    causal = torch.ones(_DIRECT, _DIRECT, dtype=torch.bool, device=a.device).tril()[..., None]
    decay = torch.where(causal, sums[..., :, None, :] - sums[..., None, :, :], float("-inf")).exp()
    found = (first[..., :, None, :] * second[..., None, :, :] * decay).sum(-1)
    width = _DIRECT
    while width < size:
        first, second, sums = (x.unflatten(-2, (size // (2 * width), 2, width)) for x in (a, b, total))
        border = sums[..., 0, -1:, :]
        later = first[..., 1, :, :] * (sums[..., 1, :, :] - border).exp()
        earlier = second[..., 0, :, :] * (border - sums[..., 0, :, :]).exp()
        below = later @ earlier.mT
        above, found = torch.zeros_like(below), found.unflatten(-3, (size // (2 * width), 2))
        upper = torch.cat([found[..., 0, :, :], above], -1)
        found = torch.cat([upper, torch.cat([below, found[..., 1, :, :]], -1)], -2)
        width *= 2
    return found.squeeze(-3)
