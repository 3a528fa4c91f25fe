"""GEMM on quantized operands, and weight gradients added into a persistent gradient."""

from .accumulate import gemm_wgrad_accumulate_, linear_accumulating
from .backends import gemm_counts, reset_gemm_counts, strict_gemms, traced_fallbacks
from .cpu import cpu_gemm, set_cpu_gemm, using_cpu_gemm
from .dense import linear, matmul
from .op import Operand, explain_gemm, gemm, scaled_gemm, scaled_gemm_accumulate_
from .operand import ScaledOperand
from .reference import epilogue_scale, scaled

__all__ = [
    "Operand",
    "ScaledOperand",
    "cpu_gemm",
    "epilogue_scale",
    "explain_gemm",
    "gemm",
    "gemm_counts",
    "gemm_wgrad_accumulate_",
    "linear",
    "linear_accumulating",
    "matmul",
    "reset_gemm_counts",
    "scaled",
    "scaled_gemm",
    "scaled_gemm_accumulate_",
    "set_cpu_gemm",
    "strict_gemms",
    "traced_fallbacks",
    "using_cpu_gemm",
]
