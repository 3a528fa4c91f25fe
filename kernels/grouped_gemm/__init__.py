"""One GEMM per expert over rows sorted by expert."""

from .choice import explain_grouped_gemm
from .few_rows import stored_grouped_gemm
from .op import grouped_gemm, grouped_gemm_wgrad, grouped_gemm_wgrad_accumulate_
from .scaled import (
    ROW_ALIGNMENT,
    scaled_grouped_gemm,
    scaled_grouped_gemm_wgrad,
    scaled_grouped_gemm_wgrad_accumulate_,
)

__all__ = [
    "ROW_ALIGNMENT",
    "explain_grouped_gemm",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_accumulate_",
    "scaled_grouped_gemm",
    "scaled_grouped_gemm_wgrad",
    "scaled_grouped_gemm_wgrad_accumulate_",
    "stored_grouped_gemm",
]
