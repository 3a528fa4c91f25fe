"""Biases of attention scores: given ones, and ALiBi's (arXiv 2108.12409).

B batch, S queries, L keys, N heads.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

BiasType = Literal["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"]


class ScoreBias(NamedTuple):
    """kind: whether `bias`, broadcastable to [B, N, S, L], is added to the scores before or after they are scaled, or
    minus the distance times `slopes`, [N] or [B, N]; None: the usual ones."""

    kind: BiasType = "no_bias"
    bias: Tensor | None = None
    slopes: Tensor | None = None

    def check(self) -> None:
        """Raise ValueError where something is missing, or given and would not be looked at."""
        if self.kind not in get_args(BiasType):
            raise ValueError(
                f"core_attention_bias_type is {self.kind!r}; allowed: {', '.join(map(repr, get_args(BiasType)))}"
            )
        if (self.bias is not None) != (self.kind in ("pre_scale_bias", "post_scale_bias")):
            is_given = "missing" if self.bias is None else "given"
            raise ValueError(f"core_attention_bias is {is_given} with core_attention_bias_type {self.kind!r}")
        if self.slopes is not None and self.kind != "alibi":
            raise ValueError(f"alibi_slopes are given with core_attention_bias_type {self.kind!r}; allowed: 'alibi'")

    def values(self, distance: Tensor, heads: int, scale: float | Tensor, device: torch.device) -> Tensor | None:
        """Return what is added to the scaled scores, broadcastable to [B, N, S, L]. distance: [B or 1, 1, S, L]."""
        self.check()
        if self.kind == "alibi":
            slopes = usual_slopes(heads, device) if self.slopes is None else self.slopes
            return -distance.abs() * slopes.float().unflatten(-1, (-1, 1, 1))
        return self.bias * scale if self.kind == "pre_scale_bias" and self.bias is not None else self.bias


def usual_slopes(heads: int, device: torch.device) -> Tensor:
    """Return ALiBi's slope of each head, float32 [N]: the powers of 2^(-8/n), n the largest power of two up to `heads`,
    and for the heads beyond n every other power of 2^(-4/n)."""
    n = 1 << (int(heads).bit_length() - 1)
    # computed on the device: given a list, it makes the host wait in every call, and no CUDA graph takes that
    number = torch.arange(heads, dtype=torch.float32, device=device)
    return torch.exp2(torch.where(number < n, (number + 1) * (-8 / n), ((number - n) * 2 + 1) * (-4 / n)))
