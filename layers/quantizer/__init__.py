"""Quantizers: values that turn a high-precision tensor into a quantized one, and say what its stored fields mean.

A quantizer is a frozen dataclass: two with equal fields are the same quantizer, and the compiler may bake one into a
graph as a constant. It holds no tensors and no process groups. A change of usage is a new value (`with_usage`).

Fields are the bare tensors of a quantized tensor, by name: rowwise_* serve the GEMMs that contract the last dimension,
columnwise_* those that contract the first one; a format whose blocks are square (or that has one scale) needs no
columnwise copy, its transpose has the same numbers. Every method takes leading batch dimensions, so the members of a
grouped weight [G, out, in] are quantized in one call.
"""

from .base import Quantizer
from .blockwise import Float8BlockQuantizer, MXFP8Quantizer
from .encoding import Fields, Usage
from .fp8 import Float8CurrentScalingQuantizer, FP8Quantizer
from .hybrid import HybridQuantizer
from .identity import IdentityQuantizer
from .integer import Int4Quantizer, Int8Quantizer, IntQuantizer
from .nvfp4 import NVFP4Quantizer

QUANTIZERS: dict[str, type[Quantizer]] = {
    c.FORMAT: c
    for c in (
        Float8CurrentScalingQuantizer,
        Float8BlockQuantizer,
        MXFP8Quantizer,
        NVFP4Quantizer,
        Int4Quantizer,
        Int8Quantizer,
        IdentityQuantizer,
        HybridQuantizer,
    )
}
"""Format name -> the class that `Quantizer.from_dict` rebuilds."""

__all__ = [
    "QUANTIZERS",
    "FP8Quantizer",
    "Fields",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "Int4Quantizer",
    "Int8Quantizer",
    "IntQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "Usage",
]
