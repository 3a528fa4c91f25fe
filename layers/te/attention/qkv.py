"""Queries, keys and values in joint projections, by head.

N query heads, G key/value heads (query groups), D head channels.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from te_models.kernels.norm import l2_norm
from te_models.suggestions import shown

from ..module.norm import NORMS

QkNorm = Literal["RMSNorm", "LayerNorm", "L2Normalization"]


class L2Normalization(nn.Module):
    """`x / sqrt(sum(x^2) + eps)` over the last dimension."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D]."""
        return l2_norm(x, self.eps)


def qk_norm(kind: QkNorm | None, channels: int, eps: float, **new: Any) -> nn.Module | None:
    """Return the norm of queries or keys [..., D] of this name. ValueError for another."""
    if kind is None:
        return None
    if kind == "L2Normalization":
        return L2Normalization(eps)
    if kind not in NORMS:
        raise ValueError(f"qk_norm_type is {shown(kind)}; allowed: None, 'RMSNorm', 'LayerNorm', 'L2Normalization'")
    return NORMS[kind](channels, eps, **new)


def split_qkv(mixed: Tensor, heads: int, groups: int, *, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [..., N, D], k and v [..., G, D] of [..., (N + 2 G) D]. interleaved: the channels are [G, N / G queries,
    key, value][D], else all queries, then all keys, then all values."""
    if not interleaved:
        q, k, v = mixed.unflatten(-1, (heads + 2 * groups, -1)).split((heads, groups, groups), dim=-2)
        return q, k, v
    by_group = mixed.unflatten(-1, (groups, heads // groups + 2, -1))
    return by_group[..., :-2, :].flatten(-3, -2), by_group[..., -2, :], by_group[..., -1, :]


def split_kv(mixed: Tensor, groups: int, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return k and v [..., G, D] of [..., 2 G D]: [G, key, value][D] interleaved, else keys, then values."""
    if interleaved:
        k, v = mixed.unflatten(-1, (groups, 2, -1)).unbind(-2)
    else:
        k, v = mixed.unflatten(-1, (2, groups, -1)).unbind(-3)
    return k, v


def join_parameters(state: dict[str, Any], prefix: str, parts: tuple[str, ...]) -> None:
    """Replace `query_weight`, `key_weight`, ... below `prefix` by one `weight`, if all are there; biases alike."""
    for kind in ("weight", "bias"):
        names = [f"{prefix}{part}_{kind}" for part in parts]
        if all(name in state for name in names):
            state[f"{prefix}{kind}"] = torch.cat([state.pop(name) for name in names])
