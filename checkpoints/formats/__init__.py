"""Quantized formats of Hugging Face files: one declaration each, and how they are read into our storage and written.

A folder's format is what its config.json or hf_quant_config.json declares, never a guess from shapes. `format` says
what a declaration holds; `namespace` turns a family's weight map into one of the fields of quantized tensors;
`views` reads the files' tensors as those fields, or as plain values, a region at a time; `encode` is the way back.
"""

from __future__ import annotations

from .declaration import (
    SEPARATE,
    WRITABLE,
    declared,
    format_named,
    hf_config_of,
    parse,
    representing_format,
    transformers_note,
    without_quantization,
)
from .format import Declaration, WeightFormat

__all__ = [
    "SEPARATE",
    "WRITABLE",
    "Declaration",
    "WeightFormat",
    "declared",
    "format_named",
    "hf_config_of",
    "parse",
    "representing_format",
    "transformers_note",
    "without_quantization",
]
