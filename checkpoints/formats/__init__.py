"""Quantized formats of Hugging Face files: one declaration each, and how they are read into our storage and written.

A folder's format is what its config.json or hf_quant_config.json declares, never a guess from shapes. `format` says
what a declaration holds; `namespace` turns a family's weight map into one of the fields of quantized tensors;
`views` reads the files' tensors as those fields, or as plain values, a region at a time; `encode` is the way back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_models.lazy import lazy_names

from .separate import (
    SEPARATE,
    VALUES,
    config_within,
    declares_quantization,
    said_of_quantization,
    with_quantization,
    without_quantization,
)

if TYPE_CHECKING:
    from .declaration import (
        WRITABLE,
        declared,
        format_named,
        hf_config_of,
        parse,
        representing_format,
        transformers_note,
    )
    from .format import Declaration, WeightFormat

__all__ = [
    "SEPARATE",
    "VALUES",
    "WRITABLE",
    "Declaration",
    "WeightFormat",
    "config_within",
    "declared",
    "declares_quantization",
    "format_named",
    "hf_config_of",
    "parse",
    "representing_format",
    "said_of_quantization",
    "transformers_note",
    "with_quantization",
    "without_quantization",
]

# of a folder in high precision nothing more is needed, and torch is not imported for it
__getattr__, __dir__ = lazy_names(__name__)
