"""LoRA of the layers with one weight: Linear, and LayerNormLinear after its norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .adapter import LoraAdapter, plus


class LoraLinear(LoraAdapter):
    """`y = x w^T + b + scaling * (x A^T) B^T`, on a `Linear`."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """As the layer's: x: [..., in_features] -> [..., out_features]."""
        adapters = self.applied(options)
        y = self.base_layer(x, *args, **options)
        return plus(y, self.delta(x, adapters)) if adapters else y


class LoraLayerNormLinear(LoraAdapter):
    """The same on a `LayerNormLinear`, with norm(x) in place of x: what the weight is multiplied with."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """As the layer's: x: [..., in_features] -> [..., out_features]."""
        adapters = self.applied(options)
        if not adapters:
            return self.base_layer(x, *args, **options)
        y, normed = self.base_layer.forward_with_norm(x, *args, **options)
        assert normed is not None, "it was asked for"
        return plus(y, self.delta(normed, adapters))
