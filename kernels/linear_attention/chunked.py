"""Linear attention with decay in chunks (arXiv 2307.08621, section 2.1; arXiv 2405.21060, section 6).

With G the sum of g within a chunk, and S the state before it:
    out = exp(G) q S + tril(q k^T exp(G_i - G_j)) v;   S' = exp(G_C) S + (exp(G_C - G) k)^T v
Every exponent is 0 or less, so that nothing overflows.
"""

import torch
from torch import Tensor

from ..chunks import chunks_of, finite_decay, join_chunks, marks_of, masked, wide
from .states import decayed_states


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, T, H, V] and the states behind chunks [N, B, H, K, V]. Arguments: as of the definition; T >= 1.

    starts: [B, T] bool, where a state of zeros begins.
    """
    dtype, (batch, tokens, heads, V), (key_heads, K) = wide(v), v.shape, k.shape[2:]
    marks = marks_of(starts, v.device)
    groups = (key_heads, heads // key_heads)
    q, k = (chunks_of(x.to(dtype)) for x in (q, k))
    v, total = chunks_of(v.to(dtype)), chunks_of(finite_decay(g.to(dtype))).cumsum(-1)
    decay = torch.where(marks.sees, total[..., :, None] - total[..., None, :], float("-inf")).exp()
    last = total[..., -1:]
    entered, left = masked(total.exp(), marks.enters)[..., None], masked((last - total).exp(), marks.leaves)[..., None]
    passed = masked(last[..., 0].exp(), marks.passes)
    scores = ((scale * q @ k.mT).unsqueeze(3) * decay.unflatten(2, groups)).flatten(2, 3)
    added = k.unsqueeze(3).mT @ (left * v).unflatten(2, groups)
    if initial_state is None:
        initial_state = v.new_zeros(batch, heads, K, V)
    chunks, rows = k.shape[0], batch * heads
    state = initial_state.to(dtype).reshape(rows, K, V)
    states = decayed_states(added.reshape(chunks, rows, K, V), passed.reshape(chunks, rows, 1, 1), state)
    before = torch.cat([state[None], states[:-1]]).view(chunks, batch, *groups, K, V)
    entering = ((scale * q).unsqueeze(3) @ before).flatten(2, 3) * entered
    return join_chunks(entering + scores @ v, tokens), states.view(chunks, batch, heads, K, V)
