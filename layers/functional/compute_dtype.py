"""The dtype that a GEMM computes in."""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.kernels.torch_versions import constant_when_traced


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
