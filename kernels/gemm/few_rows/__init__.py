"""A few rows by a weight that is stored quantized, on CPU: decoded in registers, one or half a byte read per value."""

from .integers import IntegerOperand
from .known_weight import KnownWeight
from .op import (
    FEW,
    as_stored,
    choose_stored,
    dequantized_weight,
    differentiates,
    reason_against_format,
    stored_weight_linear,
    uses_few_rows,
)

__all__ = [
    "FEW",
    "IntegerOperand",
    "KnownWeight",
    "as_stored",
    "choose_stored",
    "dequantized_weight",
    "differentiates",
    "reason_against_format",
    "stored_weight_linear",
    "uses_few_rows",
]
