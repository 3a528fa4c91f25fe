"""Public scaled GEMM. The exact emulation is what runs: the device's own GEMM on dequantized operands."""

from .reference import Operand, gemm

__all__ = ["Operand", "gemm"]
