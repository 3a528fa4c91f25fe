"""Quantizing on a CPU in one C++ pass, with the definitions' bits: rounded for a GEMM, or into fields that it reads."""

from .fields import (
    FIELDS,
    Measured,
    chosen,
    decode_e4m3,
    decode_nvfp4,
    encode_blocks,
    has_nan,
    quantize_blocks,
    quantize_nvfp4,
    quantize_scaled,
)
from .fields_op import (
    decoded,
    read_numbers,
    read_nvfp4,
    store_blocks,
    store_current,
    store_nvfp4,
    store_scaled,
)

__all__ = [
    "FIELDS",
    "Measured",
    "chosen",
    "decode_e4m3",
    "decode_nvfp4",
    "decoded",
    "encode_blocks",
    "has_nan",
    "quantize_blocks",
    "quantize_nvfp4",
    "quantize_scaled",
    "read_numbers",
    "read_nvfp4",
    "store_blocks",
    "store_current",
    "store_nvfp4",
    "store_scaled",
]
