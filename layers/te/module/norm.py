"""LayerNorm and RMSNorm with Transformer Engine's arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...module import norm
from ..arguments import takes_also, takes_at_default
from ..stands_for import StandsFor


class RMSNorm(norm.RMSNorm, metaclass=StandsFor):
    """Root mean square norm: `gamma * x / sqrt(mean(x^2) + eps)`.

    normalized_shape: the last dimension, or the last few. zero_centered_gamma: the weight stores gamma - 1. cast_order:
    where the product is rounded, see `te_models.kernels.norm`. Transformer Engine: `te.pytorch.RMSNorm`.
    """

    CORE = norm.RMSNorm

    @takes_also(hidden_size="normalized_shape")
    @takes_at_default(sequence_parallel=None)
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        cast_order: str = "weight_last",
        has_weight: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            zero_centered_gamma=zero_centered_gamma,
            cast_order=cast_order,
            has_weight=has_weight,
            params_dtype=params_dtype,
            device=device,
        )


class LayerNorm(norm.LayerNorm, metaclass=StandsFor):
    """Layer norm: `gamma * (x - mean) / sqrt(var + eps) + beta`; arguments as for RMSNorm, plus `bias`."""

    CORE = norm.LayerNorm

    @takes_also(hidden_size="normalized_shape")
    @takes_at_default(sequence_parallel=None)
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        cast_order: str = "weight_first",
        has_weight: bool = True,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            zero_centered_gamma=zero_centered_gamma,
            cast_order=cast_order,
            has_weight=has_weight,
            bias=bias,
            params_dtype=params_dtype,
            device=device,
        )


NORMS: dict[str, type[RMSNorm | LayerNorm]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""By Transformer Engine's names."""
