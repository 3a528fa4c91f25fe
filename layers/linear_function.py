"""`y = x w^T + b` in high precision or under a recipe: the one implementation behind every dense layer."""

from __future__ import annotations

import torch
from torch import Tensor

from .module import compute_dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight^T + bias` in the compute dtype. x: [..., in]; weight: [out, in]; bias: [out] or None."""
    dtype = compute_dtype(x)
    bias = None if bias is None else bias.to(dtype)
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), bias)
