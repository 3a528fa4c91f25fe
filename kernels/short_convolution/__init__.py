"""Short causal convolutions of each channel by itself, before the rules that carry a state."""

from .op import short_convolution

__all__ = ["short_convolution"]
