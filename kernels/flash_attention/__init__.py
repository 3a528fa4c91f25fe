"""Softmax attention without a mask on a CPU, in C++: scores exist a tile at a time, in both passes."""

from .library import ATTENTION, BACKWARD, attention_backward, attention_forward
from .op import fits, flash_attention, uses_flash_attention

__all__ = [
    "ATTENTION",
    "BACKWARD",
    "attention_backward",
    "attention_forward",
    "fits",
    "flash_attention",
    "uses_flash_attention",
]
