"""Casting to FP8 and FP4 with scale factors per tensor, per block and per microscaling (MX, NVFP4) block, and back."""

from .cpu.rounding_op import (
    raised_amax,
    random_hadamard,
    round_blockwise,
    round_current,
    round_current_nvfp4,
    round_nvfp4,
    round_per_tensor,
)
from .fp8.blocks import block_statistics, blockwise_amax, row_amax
from .fp8.cpu import fp8_to_float
from .fp8.op import (
    amax,
    dequantize_blockwise,
    dequantize_per_tensor,
    grouped_amax,
    quantize_blockwise,
    quantize_blockwise_both,
    quantize_grouped_blockwise,
    quantize_grouped_per_tensor,
    quantize_per_tensor,
)
from .fp8.reference import FP8_MAX, e8m0_to_float, scale_from_amax
from .fp8.rounding import quantize_and_round
from .hadamard import flip_signs, inverse_random_hadamard
from .hashed import hash_key, hashed_bits
from .nvfp4.copies import transpose_nvfp4
from .nvfp4.four_over_six import ErrorMode, quantize_four_over_six
from .nvfp4.op import (
    decode_blocks,
    dequantize_nvfp4,
    quantize_grouped_four_over_six,
    quantize_grouped_nvfp4,
    quantize_nvfp4,
    quantize_nvfp4_transposed,
)
from .nvfp4.reference import global_decode
from .output import QuantizedOutput
from .random import random_bits

__all__ = [
    "FP8_MAX",
    "ErrorMode",
    "QuantizedOutput",
    "amax",
    "block_statistics",
    "blockwise_amax",
    "decode_blocks",
    "dequantize_blockwise",
    "dequantize_nvfp4",
    "dequantize_per_tensor",
    "e8m0_to_float",
    "flip_signs",
    "fp8_to_float",
    "global_decode",
    "grouped_amax",
    "hash_key",
    "hashed_bits",
    "inverse_random_hadamard",
    "quantize_and_round",
    "quantize_blockwise",
    "quantize_blockwise_both",
    "quantize_four_over_six",
    "quantize_grouped_blockwise",
    "quantize_grouped_four_over_six",
    "quantize_grouped_nvfp4",
    "quantize_grouped_per_tensor",
    "quantize_nvfp4",
    "quantize_nvfp4_transposed",
    "quantize_per_tensor",
    "raised_amax",
    "random_bits",
    "random_hadamard",
    "round_blockwise",
    "round_current",
    "round_current_nvfp4",
    "round_nvfp4",
    "round_per_tensor",
    "row_amax",
    "scale_from_amax",
    "transpose_nvfp4",
]
