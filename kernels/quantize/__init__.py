"""Casting to FP8 with per-tensor, blockwise and microscaling (MX) scale factors, and back."""

from .op import (
    FP8_MAX,
    blockwise_amax,
    dequantize_blockwise,
    dequantize_per_tensor,
    e8m0_to_float,
    quantize_blockwise,
    quantize_per_tensor,
    scale_from_amax,
)

__all__ = [
    "FP8_MAX",
    "blockwise_amax",
    "dequantize_blockwise",
    "dequantize_per_tensor",
    "e8m0_to_float",
    "quantize_blockwise",
    "quantize_per_tensor",
    "scale_from_amax",
]
