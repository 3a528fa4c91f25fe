"""GEMM on quantized operands."""

from .accumulate import gemm_wgrad_accumulate_
from .op import Operand, gemm

__all__ = ["Operand", "gemm", "gemm_wgrad_accumulate_"]
