"""The definition of the causal depthwise convolution, token by token.

B batch, T tokens, D channels, W width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..chunks import wide


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y [B, T, D], of each channel the sum of weight times its last W values, and the last W - 1 of them.

    x: [B, T, D]; weight: [D, W]; bias: [D]; initial_state: [B, D, W - 1], the values before x.
    """
    dtype, (batch, _, channels), width = wide(x), x.shape, weight.shape[1]
    rows = x.new_zeros(batch, channels, width - 1) if initial_state is None else initial_state.to(x.dtype)
    y = []
    for t in range(x.shape[1]):
        rows = torch.cat([rows, x[:, t, :, None]], -1)
        value = (rows.to(dtype) * weight.to(dtype)).sum(-1) + (0 if bias is None else bias.to(dtype))
        y.append(F.silu(value) if activation == "silu" else value)
        rows = rows[..., 1:]
    return torch.stack(y, 1).to(x.dtype) if y else torch.zeros_like(x), rows
