"""A few rows by a weight that is stored quantized, on CPU: decoded in registers, one or half a byte read per value."""

from .integers import IntegerOperand
from .op import FEW, as_stored, choose_stored, dequantize, differentiates, linear, reason_against_format, serves

__all__ = [
    "FEW",
    "IntegerOperand",
    "as_stored",
    "choose_stored",
    "dequantize",
    "differentiates",
    "linear",
    "reason_against_format",
    "serves",
]
