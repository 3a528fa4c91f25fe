"""Softmax attention without a mask on a CPU, in C++: scores exist a tile at a time, in both passes."""

from .library import ATTENTION, BACKWARD, run_backward, run_forward
from .op import fits, flash_attention, serves

__all__ = ["ATTENTION", "BACKWARD", "fits", "flash_attention", "run_backward", "run_forward", "serves"]
