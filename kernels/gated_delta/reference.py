"""The definition of the gated delta rule, token by token (arXiv 2412.06464, equation 10; by channel: arXiv 2510.26692).

B batch, T tokens, Hk heads of q and k, H heads of v, K and V channels.
"""

import torch
from torch import Tensor

from ..chunks import wide


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out [B, T, H, V] and the state behind the last token [B, H, K, V].

    A state forgets by exp(g), g [B, T, H] or [B, T, H, K], and corrects what it holds for k towards v by beta [B, T,
    H]: S = exp(g) S; S = S + beta k (v - S^T k)^T; out = scale S^T q. q, k: [B, T, Hk, K]; v: [B, T, H, V].
    """
    dtype, repeats = wide(q), v.shape[2] // k.shape[2]
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    if initial_state is not None:
        state = initial_state.to(dtype)
    out = []
    for t in range(v.shape[1]):
        query, key = (x[:, t].to(dtype).repeat_interleave(repeats, 1)[..., None] for x in (q, k))
        decay = g[:, t].to(dtype).exp()
        state = state * (decay[..., None] if g.dim() == 4 else decay[..., None, None])
        error = v[:, t].to(dtype) - (state * key).sum(2)
        state = state + key * (beta[:, t].to(dtype)[..., None] * error)[:, :, None]
        out.append(scale * (state * query).sum(2))
    return torch.stack(out, 1).to(v.dtype) if out else torch.zeros_like(v), state
