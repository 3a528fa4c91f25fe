"""Where a folder says that it is quantized, and its configuration without that: what is asked of every folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEPARATE = "hf_quant_config.json"
VALUES = "values"
"""As a storage: no fields, the plain values of everything."""
IN_CONFIG = "quantization_config"
OUTSIDE = ("expert_dtype",)
"""Fields of config.json that belong to `quantization_config` and lie beside it in some files (DeepSeek-V4)."""


TEXT = "text_config"
"""The text model within a model that also sees images: some files have `quantization_config` there (Kimi-K2.5)."""


def said_of_quantization(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json (`values`) that say something about quantization, as they lie in it."""
    text = values.get(TEXT)
    if values.get(IN_CONFIG) is None and isinstance(text, dict) and text.get(IN_CONFIG) is not None:
        return {TEXT: {IN_CONFIG: text[IN_CONFIG]}}
    return {name: values[name] for name in (IN_CONFIG, *OUTSIDE) if values.get(name) is not None}


def config_within(said: Mapping[str, Any]) -> Any:
    """Return `quantization_config` of what `said_of_quantization` returned; None without one."""
    return said.get(TEXT, said).get(IN_CONFIG)


def declares_quantization(values: Mapping[str, Any], folder: Path) -> bool:
    """Whether config.json (`values`) or hf_quant_config.json of a folder says something about quantization."""
    path, said = folder / SEPARATE, said_of_quantization(values)
    return IN_CONFIG in said or TEXT in said or path.exists() or path.is_symlink()


def with_quantization(values: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with fields that `said_of_quantization` returned."""
    if TEXT in said:
        said = {TEXT: {**(values.get(TEXT) or {}), **said[TEXT]}}
    return {**values, **said}


def without_quantization(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without what it says about quantization: the model's own fields."""
    found = {name: value for name, value in values.items() if name not in (IN_CONFIG, *OUTSIDE)}
    if isinstance(found.get(TEXT), dict):
        found[TEXT] = {name: value for name, value in found[TEXT].items() if name != IN_CONFIG}
    return found
