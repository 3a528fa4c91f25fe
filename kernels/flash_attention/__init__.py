"""Softmax attention without a mask on a CPU, in C++: scores exist a tile at a time, in both passes."""

from .library import run_backward, run_forward
from .op import fits, flash_attention, is_there, serves

__all__ = ["fits", "flash_attention", "is_there", "run_backward", "run_forward", "serves"]
