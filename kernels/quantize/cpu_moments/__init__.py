"""Moments of an optimizer in few bits on CPU, read and rounded in one C++ pass each, to the definitions' bits."""

from .library import (
    Hyperparameters,
    adamw_step,
    available,
    decode_moments,
    encode_moments,
    round_moments,
    updates,
)

__all__ = [
    "Hyperparameters",
    "adamw_step",
    "available",
    "decode_moments",
    "encode_moments",
    "round_moments",
    "updates",
]
