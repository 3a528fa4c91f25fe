"""Quantizing matrices into stored fields on CPU in one C++ pass, and reading FP8: with the definitions' bits."""

from .library import (
    Measured,
    decode_blocks,
    decode_e4m3,
    decode_nvfp4,
    has_nan,
    quantize_blocks,
    quantize_nvfp4,
    quantize_scaled,
    ready,
    worthwhile,
)
from .op import (
    read_blocks,
    read_numbers,
    read_nvfp4,
    reads,
    store_blocks,
    store_current,
    store_nvfp4,
    store_scaled,
    stores,
)

__all__ = [
    "Measured",
    "decode_blocks",
    "decode_e4m3",
    "decode_nvfp4",
    "has_nan",
    "quantize_blocks",
    "quantize_nvfp4",
    "quantize_scaled",
    "read_blocks",
    "read_numbers",
    "read_nvfp4",
    "reads",
    "ready",
    "store_blocks",
    "store_current",
    "store_nvfp4",
    "store_scaled",
    "stores",
    "worthwhile",
]
