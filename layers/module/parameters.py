"""What the layers with weights have in common: creating parameters, initialising them, choosing the compute dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from te_models.kernels.torch_versions import constant_when_traced

InitMethod = Callable[[Tensor], object]


def default_init_method(weight: Tensor) -> Tensor:
    """Fill with N(0, 0.023^2), Transformer Engine's default."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


@constant_when_traced  # torch guards its autocast itself; traced, each function named here would be one more guard
def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that an enabled `torch.amp.autocast` of this device asks for, or None."""
    known = device_type != "meta"  # for which torch raises
    return torch.get_autocast_dtype(device_type) if known and torch.is_autocast_enabled(device_type) else None


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a GEMM on x runs in: that of an enabled `torch.amp.autocast`, else x's own. ValueError for
    integers, to which the weights would be rounded."""
    if not x.is_floating_point():
        require_floating(x.dtype)
    return autocast_dtype(x.device.type) or x.dtype


def require_floating(dtype: torch.dtype) -> None:
    """Raise ValueError for the dtype of an input that a GEMM cannot compute in."""
    if not dtype.is_floating_point:
        raise ValueError(f"the input has dtype {dtype}; allowed: a floating-point dtype")


def empty_parameter(*shape: int, params_dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """Return an uninitialised parameter; `params_dtype` None is torch's default dtype."""
    return nn.Parameter(torch.empty(*shape, dtype=params_dtype or torch.get_default_dtype(), device=device))
