"""The definition of linear attention with decay, token by token (arXiv 2401.04658; arXiv 2307.08621, section 2.1).

B batch, T tokens, Hk heads of q and k, H heads of v, K and V channels.
"""

import torch
from torch import Tensor

from ..chunks import wide


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out [B, T, H, V] and the state behind the last token [B, H, K, V].

    S = exp(g) S + k v^T; out = scale S^T q. q, k: [B, T, Hk, K]; v: [B, T, H, V]; g: [B, T, H].
    """
    dtype, repeats = wide(v), v.shape[2] // k.shape[2]
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    if initial_state is not None:
        state = initial_state.to(dtype)
    out = []
    for t in range(v.shape[1]):
        query, key = (x[:, t].to(dtype).repeat_interleave(repeats, 1)[..., None] for x in (q, k))
        state = g[:, t].to(dtype).exp()[..., None, None] * state + key * v[:, t].to(dtype)[:, :, None]
        out.append(scale * (state * query).sum(2))
    return torch.stack(out, 1).to(v.dtype) if out else torch.zeros_like(v), state
