"""Activations of the MLP, plain and gated."""

from .op import ACTIVATIONS, activation, gated_activation

__all__ = ["ACTIVATIONS", "activation", "gated_activation"]
