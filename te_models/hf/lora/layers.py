"""What peft puts in the place of each layer: our adapted layers, with the adapters that peft keeps by name."""

from ...lora.layers import (
    SECOND,
    AdaptedGroupedLinear,
    AdaptedLayerNormLinear,
    AdaptedLayerNormMLP,
    AdaptedLinear,
)
from .adapter import LoraAdapter, LoraLayer


class LoraLinear(AdaptedLinear, LoraAdapter):
    """See `AdaptedLinear`."""


class LoraLayerNormLinear(AdaptedLayerNormLinear, LoraAdapter):
    """See `AdaptedLayerNormLinear`."""


class LoraLayerNormMLP(AdaptedLayerNormMLP, LoraAdapter):
    """See `AdaptedLayerNormMLP`."""

    adapter_layer_names = (*LoraLayer.adapter_layer_names, *SECOND)


class LoraGroupedLinear(AdaptedGroupedLinear, LoraAdapter):
    """See `AdaptedGroupedLinear`."""
