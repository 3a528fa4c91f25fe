"""What the layers with weights have in common: creating parameters and initialising them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def default_init_method(weight: Tensor) -> Tensor:
    """Fill with N(0, 0.023^2), Transformer Engine's default."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


def empty_parameter(*shape: int, params_dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """Return an uninitialised parameter; `params_dtype` None is torch's default dtype."""
    return nn.Parameter(torch.empty(*shape, dtype=params_dtype or torch.get_default_dtype(), device=device))
