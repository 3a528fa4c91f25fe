"""One GEMM per expert over rows sorted by expert."""

from .op import grouped_gemm, grouped_gemm_wgrad

__all__ = ["grouped_gemm", "grouped_gemm_wgrad"]
