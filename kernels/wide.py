"""The dtype of what is computed before one rounding: float32, float64 of such values."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return float32, or float64 of such x."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """Return x in `wide_dtype`."""
    return x.to(wide_dtype(x))
