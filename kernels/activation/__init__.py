"""Activations of the MLP, plain and gated, with the result in high precision or as FP8."""

from .op import ACTIVATIONS, activation, gated_activation
from .quantized import Activation, activation_quantized, gated_activation_quantized

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "activation",
    "activation_quantized",
    "gated_activation",
    "gated_activation_quantized",
]
