"""GEMM on quantized operands."""

from .op import Operand, gemm

__all__ = ["Operand", "gemm"]
