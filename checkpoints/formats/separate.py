"""Where a folder says that it is quantized, and its configuration without that: what is asked of every folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEPARATE = "hf_quant_config.json"
VALUES = "values"
"""As a storage: no fields, the plain values of everything."""
IN_CONFIG = "quantization_config"
OUTSIDE = ("expert_dtype",)
"""Fields of config.json that belong to `quantization_config` and lie beside it in some files (DeepSeek-V4)."""


def declares_quantization(values: Mapping[str, Any], folder: Path) -> bool:
    """Whether config.json (`values`) or hf_quant_config.json of a folder says something about quantization."""
    path = folder / SEPARATE
    return values.get(IN_CONFIG) is not None or path.exists() or path.is_symlink()


def without_quantization(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without what it says about quantization: the model's own fields."""
    return {name: value for name, value in values.items() if name not in (IN_CONFIG, *OUTSIDE)}
