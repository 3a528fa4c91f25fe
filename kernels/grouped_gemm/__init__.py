"""One GEMM per expert over rows sorted by expert."""

from .accumulate import grouped_gemm_wgrad_accumulate_
from .op import grouped_gemm, grouped_gemm_wgrad

__all__ = ["grouped_gemm", "grouped_gemm_wgrad", "grouped_gemm_wgrad_accumulate_"]
