"""The rotary embedding in config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4).

Precedence follows transformers 5: `rope_scaling` replaces `rope_parameters`; inside, `rope_theta` and `rope_type`
(older: `type`) win over the fields of the same name outside. Keys that the rope type does not use are ignored there and
here; keys nobody knows are refused, because they may change the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from ..errors import CheckpointError
from .fields import REQUIRED, Values, read_typed, shorten_value

_TYPES = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "llama3": "llama3",
}
_NUMBERS = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("factor", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_WITH_ORIGINAL_LENGTH = ("yarn", "longrope", "llama3")
_KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "truncate",
    "short_factor",
    "long_factor",
}.union(*_NUMBERS.values())


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a family whose default base is `theta`; `partial` allows rotating part of the head."""

    theta: float = 10000.0
    partial: bool = False
    names: tuple[str, ...] = (
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    )

    def read(self, hf: Mapping[str, Any]) -> Values:
        values = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        if not isinstance(values, dict):
            raise CheckpointError(f"config.json has rope parameters that are not an object: {shorten_value(values)}")
        unknown = sorted(set(values) - _KNOWN)
        if unknown:
            raise CheckpointError(f"config.json has the unknown rope parameter {shorten_value(unknown[0])}")
        outside = {name: hf[name] for name in ("rope_theta", "partial_rotary_factor") if hf.get(name) is not None}
        values = outside | {k: v for k, v in values.items() if v is not None}
        kind = values.get("rope_type", values.get("type", "default"))
        if not isinstance(kind, str) or kind not in _TYPES:
            raise CheckpointError(
                f"config.json has the rope type {shorten_value(kind)}; supported: {', '.join(_TYPES)}"
            )
        fraction = read_typed(values, "partial_rotary_factor", float, 1.0)
        if fraction != 1.0 and not self.partial:
            raise CheckpointError(
                f"config.json has partial_rotary_factor = {fraction}, which this family does not have"
            )
        scaling = _TYPES[kind]
        result: Values = {"rotary_base": read_typed(values, "rope_theta", float, self.theta), "scaling": scaling}
        result["rotary_percent"] = fraction
        for name in _NUMBERS[scaling]:
            result[name] = read_typed(values, name, float, None)
        if scaling in _WITH_ORIGINAL_LENGTH:
            _read_original_length(hf, values, result)
        if scaling == "yarn":
            # 32, 1 and true are transformers' values for absent (or zero) ones; written out so that nobody has to guess
            result["beta_fast"], result["beta_slow"] = result["beta_fast"] or 32.0, result["beta_slow"] or 1.0
            result["truncate"] = read_typed(values, "truncate", bool, True)
        if scaling == "longrope":
            result["short_factor"] = read_typed(values, "short_factor", list, REQUIRED)
            result["long_factor"] = read_typed(values, "long_factor", list, REQUIRED)
        return {f"rope.{name}": value for name, value in result.items() if value is not None}

    def write(self, config: ModelConfig) -> Values:
        rope = config.rope
        inverse = {ours: theirs for theirs, ours in reversed(_TYPES.items())}
        values: Values = {"rope_type": inverse.get(rope.scaling, rope.scaling), "rope_theta": rope.rotary_base}
        for name in (*_NUMBERS.get(rope.scaling, ()), "original_max_position_embeddings", "truncate"):
            value = getattr(rope, name)
            if value is not None:
                values[name] = value
        for name in ("short_factor", "long_factor"):
            factors = getattr(rope, name)
            if factors is not None:
                values[name] = list(factors)
        if self.partial:
            values["partial_rotary_factor"] = rope.rotary_percent
        return {"rope_parameters": values}


def _read_original_length(hf: Mapping[str, Any], values: Values, result: Values) -> None:
    """Fill the length before extension (a field outside wins) and an absent factor, which the lengths imply."""
    longest = read_typed(hf, "max_position_embeddings", int, REQUIRED)
    original = read_typed(hf, "original_max_position_embeddings", int, None)
    original = original or read_typed(values, "original_max_position_embeddings", int, longest)
    if original <= 0:
        raise CheckpointError(f"config.json has original_max_position_embeddings = {original}")
    result["original_max_position_embeddings"] = original
    if result["factor"] is None:
        result["factor"] = longest / original
