"""Rounding to a format and back as operations of a CPU graph, each compiled once per format and dtype, from C++."""

from .op import random_hadamard, round_blockwise, round_nvfp4

__all__ = ["random_hadamard", "round_blockwise", "round_nvfp4"]
