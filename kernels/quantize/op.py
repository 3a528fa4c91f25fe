"""Public quantization functions. The reference is what runs; under torch.compile Inductor fuses a quantization with
its dequantization and with the neighbouring element-wise operations, so the eight-bit copy is made only where kept."""

from .blocks import amax, blockwise_amax
from .hadamard import inverse_random_hadamard, random_hadamard
from .nvfp4 import decode_blocks, dequantize_nvfp4, global_decode, quantize_nvfp4, round_nvfp4
from .random import random_bits
from .reference import (
    FP8_MAX,
    dequantize_blockwise,
    dequantize_per_tensor,
    e8m0_to_float,
    quantize_blockwise,
    quantize_blockwise_both,
    quantize_per_tensor,
    scale_from_amax,
)
from .statistics import quantization_statistics

__all__ = [
    "FP8_MAX",
    "amax",
    "blockwise_amax",
    "decode_blocks",
    "dequantize_blockwise",
    "dequantize_nvfp4",
    "dequantize_per_tensor",
    "e8m0_to_float",
    "global_decode",
    "inverse_random_hadamard",
    "quantization_statistics",
    "quantize_blockwise",
    "quantize_blockwise_both",
    "quantize_nvfp4",
    "quantize_per_tensor",
    "random_bits",
    "random_hadamard",
    "round_nvfp4",
    "scale_from_amax",
]
