"""Public activations. The reference is what runs: eager on any device, fused by Inductor under torch.compile."""

from .reference import ACTIVATIONS, activation, gated_activation

__all__ = ["ACTIVATIONS", "activation", "gated_activation"]
