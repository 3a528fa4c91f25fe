"""Public quantization functions. The reference is what runs; under torch.compile Inductor fuses a quantization with
its dequantization and with the neighbouring element-wise operations, so the eight-bit copy is made only where kept."""

from .reference import (
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
