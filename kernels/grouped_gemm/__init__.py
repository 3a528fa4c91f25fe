"""One GEMM per expert over rows sorted by expert."""

from .accumulate import grouped_gemm_wgrad_accumulate_
from .op import explain_grouped_gemm, grouped_gemm, grouped_gemm_wgrad
from .scaled import (
    ROW_ALIGNMENT,
    explain_scaled_grouped_gemm,
    scaled_grouped_gemm,
    scaled_grouped_gemm_wgrad,
    scaled_grouped_gemm_wgrad_accumulate_,
)

__all__ = [
    "ROW_ALIGNMENT",
    "explain_grouped_gemm",
    "explain_scaled_grouped_gemm",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_accumulate_",
    "scaled_grouped_gemm",
    "scaled_grouped_gemm_wgrad",
    "scaled_grouped_gemm_wgrad_accumulate_",
]
