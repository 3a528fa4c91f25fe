"""LoRA of both weights of LayerNormMLP: of fc1 after the norm, of fc2 after the activation."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .adapter import FIRST, LoraAdapter, LoraLayer, plus

SECOND = ("lora_fc2_A", "lora_fc2_B")


class LoraLayerNormMLP(LoraAdapter):
    """On a `LayerNormMLP`: `lora_A` and `lora_B` belong to fc1, `lora_fc2_A` and `lora_fc2_B` to fc2; the rank is that
    of both."""

    PAIRS: ClassVar[tuple[tuple[str, str], ...]] = (FIRST, SECOND)
    adapter_layer_names = (*LoraLayer.adapter_layer_names, *SECOND)

    def sizes(self) -> tuple[tuple[int, int], ...]:
        fc1, fc2 = self.base_layer.fc1_weight, self.base_layer.fc2_weight
        return (fc1.shape[1], fc1.shape[0]), (fc2.shape[1], fc2.shape[0])

    def weights(self) -> tuple[tuple[str, ...], ...]:
        return ("fc1_weight",), ("fc2_weight",)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        """As the layer's: x: [..., hidden_size] -> [..., hidden_size]."""
        adapters, layer = self.applied(options), self.base_layer
        if not adapters:
            return layer(x, is_first_microbatch)
        hidden, normed = layer.forward_fc1(x, is_first_microbatch)
        hidden = plus(hidden, self.delta(normed, adapters))
        y, activated = layer.forward_fc2(hidden, normed, is_first_microbatch, wanted=True)
        return plus(y, self.delta(activated, adapters, SECOND))
