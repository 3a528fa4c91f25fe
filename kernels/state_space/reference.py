"""The definitions of two state spaces, token by token (arXiv 2405.21060, equation 2; arXiv 2312.00752, equation 2).

B batch, T tokens, H heads of P channels, G groups of heads that share B and C, D channels, N states.
"""

import torch
from torch import Tensor

from ..chunks import wide


def state_space_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y [B, T, H, P] and the state [B, H, P, N]: S = exp(dt A) S + dt x B^T; y = S C + D x, of each head.

    x: [B, T, H, P]; dt: [B, T, H]; A, D: [H]; B, C: [B, T, G, N].
    """
    dtype, repeats = wide(x), x.shape[2] // B.shape[2]
    state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3], dtype=dtype)
    state = state if initial_state is None else initial_state.to(dtype)
    y = []
    for t in range(x.shape[1]):
        value, step, b, c = (z[:, t].to(dtype) for z in (x, dt, B, C))
        b, c = (z.repeat_interleave(repeats, 1)[:, :, None] for z in (b, c))
        state = (step * A.to(dtype)).exp()[..., None, None] * state + (step[..., None] * value)[..., None] * b
        y.append((state * c).sum(-1) + (0 if D is None else D.to(dtype)[:, None] * value))
    return torch.stack(y, 1).to(x.dtype) if y else torch.zeros_like(x), state


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y [B, T, D] and the state [B, D, N]: S = exp(dt A) S + dt x B^T; y = S C + D x, of each channel.

    x, dt: [B, T, D]; A: [D, N]; B, C: [B, T, N]; D: [D].
    """
    dtype = wide(x)
    state = x.new_zeros(x.shape[0], *A.shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    y = []
    for t in range(x.shape[1]):
        value, step, b, c = (z[:, t].to(dtype) for z in (x, dt, B, C))
        state = (step[..., None] * A.to(dtype)).exp() * state + (step * value)[..., None] * b[:, None]
        y.append((state * c[:, None]).sum(-1) + (0 if D is None else D.to(dtype) * value))
    return torch.stack(y, 1).to(x.dtype) if y else torch.zeros_like(x), state
