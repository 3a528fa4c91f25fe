"""A number by which a layer multiplies the residual stream, stored and not trained (Gemma 4)."""

import torch
from torch import Tensor, nn

from ..build import Build


class LayerScalar(nn.Module):
    """Buffer value: [1]."""

    value: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__()
        dtype = build.params_dtype or torch.get_default_dtype()
        self.register_buffer("value", torch.ones(1, dtype=dtype, device=build.device))

    def reset_parameters(self) -> None:
        """Start with 1."""
        self.value.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, H], or all lanes -> the same, multiplied."""
        return x * self.value.to(x.dtype)
