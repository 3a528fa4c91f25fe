"""The rotary embedding in config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4).

Precedence follows transformers 5: `rope_scaling` replaces `rope_parameters`; inside, `rope_theta` and `rope_type`
(older: `type`) win over the fields of the same name outside. Keys that the rope type does not use are ignored there and
here; keys nobody knows are refused, because they may change the rotation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from te_models.config import ModelConfig, RopeConfig

from ...io.errors import CheckpointError
from .fields import REQUIRED, HFConfig, Values, read_typed, shorten_value

_PROPORTIONAL = "proportional"
_TYPES = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "llama3": "llama3",
    _PROPORTIONAL: "proportional",
}
_NUMBERS = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("factor", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor",),
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
    """The rotary embedding.

    Arguments:
        theta: the family's base.
        partial: the rotated fraction of the head where the file does not say; None: always all of it.
        types: the extensions that the family's classes know.
        original: the family's length before extension where the file does not say; it has a separate field, outside.
        alpha: "dynamic" may have a fixed `alpha`; in other families it is unknown: their classes take no notice of it.
        extra: further keys of `rope_parameters` that another entry reads.
        default: `rope_parameters` where the file has none.
    """

    theta: float = 10000.0
    partial: float | None = None
    types: tuple[str, ...] = tuple(kind for kind in _TYPES if kind != _PROPORTIONAL)
    original: int | None = None
    alpha: bool = False
    extra: tuple[str, ...] = ()
    default: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = (
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    )

    def read(self, hf: HFConfig) -> Values:
        values = hf.get("rope_scaling") or hf.get("rope_parameters") or self.default
        outside = {name: hf[name] for name in ("rope_theta", "partial_rotary_factor") if hf.get(name) is not None}
        return {f"rope.{name}": value for name, value in self.rope_fields(hf, values, outside).items()}

    def rope_fields(self, hf: HFConfig, values: Any, outside: Values) -> Values:
        """Return the fields of RopeConfig that `values` give, those in `outside` where it does not have them."""
        if not isinstance(values, dict):
            raise CheckpointError(f"config.json has rope parameters that are not an object: {shorten_value(values)}")
        known = _KNOWN.union(self.extra, ("alpha",) if self.alpha else ())
        unknown = sorted(set(values) - known)
        if unknown:
            raise CheckpointError(f"config.json has the unknown rope parameter {shorten_value(unknown[0])}")
        values = outside | {k: v for k, v in values.items() if v is not None}
        if self.partial not in (None, 1.0) and "partial_rotary_factor" in hf and "partial_rotary_factor" not in values:
            # to transformers null is not the class's fraction, as if it were absent, but all of the head, or an error
            raise CheckpointError("config.json has partial_rotary_factor = None, which is not a number")
        kind = values.get("rope_type", values.get("type", "default"))
        if not isinstance(kind, str) or kind not in self.types:
            raise CheckpointError(
                f"config.json has the rope type {shorten_value(kind)}; supported: {', '.join(self.types)}"
            )
        fraction = read_typed(values, "partial_rotary_factor", float, 1.0 if self.partial is None else self.partial)
        if fraction != 1.0 and self.partial is None:
            raise CheckpointError(
                f"config.json has partial_rotary_factor = {fraction}, which this family does not have; supported: 1"
            )
        scaling = _TYPES[kind]
        result: Values = {"rotary_base": read_typed(values, "rope_theta", float, self.theta), "scaling": scaling}
        result["rotary_percent"] = fraction
        for name in (*_NUMBERS[scaling], *(("alpha",) if self.alpha and scaling == "dynamic" else ())):
            result[name] = read_typed(values, name, float, None)
        if scaling in _WITH_ORIGINAL_LENGTH:
            _read_original_length(hf, values, result, self.original)
        if scaling == "yarn":
            # 32, 1 and true are transformers' values for absent (or zero) ones; written out so that nobody has to guess
            result["beta_fast"], result["beta_slow"] = result["beta_fast"] or 32.0, result["beta_slow"] or 1.0
            result["truncate"] = read_typed(values, "truncate", bool, True)
        if scaling == "longrope":
            result["short_factor"] = read_typed(values, "short_factor", list, REQUIRED)
            result["long_factor"] = read_typed(values, "long_factor", list, REQUIRED)
        return {name: value for name, value in result.items() if value is not None}

    def write(self, config: ModelConfig) -> Values:
        values: Values = {"rope_parameters": self.rope_values(config.rope)}
        if self.original is not None and config.rope.original_max_position_embeddings is not None:
            values["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
        return values

    def rope_values(self, rope: RopeConfig) -> Values:
        """Return the object that describes `rope`."""
        inverse = {ours: theirs for theirs, ours in reversed(_TYPES.items())}
        values: Values = {"rope_type": inverse.get(rope.scaling, rope.scaling), "rope_theta": rope.rotary_base}
        alpha = ("alpha",) if self.alpha else ()
        for name in (*_NUMBERS.get(rope.scaling, ()), *alpha, "original_max_position_embeddings", "truncate"):
            value = getattr(rope, name)
            if value is not None:
                values[name] = value
        for name in ("short_factor", "long_factor"):
            factors = getattr(rope, name)
            if factors is not None:
                values[name] = list(factors)
        if self.partial is not None:
            values["partial_rotary_factor"] = rope.rotary_percent
        return values


@dataclass(frozen=True)
class RopePerLayerType:
    """One rotary embedding for full, one for sliding layers: `rope_parameters` holds an object for each.

    Older files have `rope_theta` and `rope_scaling` for the full layers; for the sliding ones `rope_local_base_freq`
    (Gemma 3) or the same base (OLMo 3). Where a file has both forms, `rope_scaling` wins field by field. older: there
    are such files; without, nothing outside `rope_parameters` counts.
    partial: the rotated fraction of the head where an object does not say, without extension; None: always all of it.
    default: the fractions of full and of sliding layers where there is no object.
    proportional: the type of this name is known, and it is that of full layers where there is no object, with this
        fraction of the head.
    """

    theta: float
    sliding_theta: float
    local: str | None = None
    older: bool = True
    names: tuple[str, ...] = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")
    partial: float | None = None
    default: tuple[float, float] | None = None
    proportional: float | None = None

    def read(self, hf: HFConfig) -> Values:
        if not self.older:
            hf = {name: hf[name] for name in ("rope_parameters", "max_position_embeddings") if name in hf}
        nested = hf.get("rope_parameters") or {}
        if not nested and self.default is not None:
            kinds = ("full_attention", "sliding_attention")
            nested = {kind: {"partial_rotary_factor": part} for kind, part in zip(kinds, self.default, strict=True)}
        if not nested and self.proportional is not None:
            nested = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": self.proportional}}
        if not isinstance(nested, dict) or not set(nested) <= {"full_attention", "sliding_attention"}:
            raise CheckpointError("config.json has rope_parameters that are not one object for each layer type")
        result: Values = {}
        for ours, theirs, theta, base in (
            ("rope", "full_attention", self.theta, "rope_theta"),
            ("rope_sliding", "sliding_attention", self.sliding_theta, self.local or "rope_theta"),
        ):
            values = nested.get(theirs) or {}
            if theirs == "full_attention" and hf.get("rope_scaling") is not None:
                values = _overlaid(values, hf["rope_scaling"])
            outside = {"rope_theta": hf[base]} if hf.get(base) is not None else {}
            plain = isinstance(values, dict) and values.get("rope_type", "default") == "default"
            partial = self.partial if plain or self.partial is None else 1.0
            outer = {name: value for name, value in hf.items() if name != "partial_rotary_factor"}
            rope = Rope(theta, partial=partial)
            if self.proportional is not None and isinstance(values, dict) and values.get("rope_type") == _PROPORTIONAL:
                rope = Rope(theta, partial=1.0, types=(_PROPORTIONAL,))
            check_nested(values)
            fields = rope.rope_fields(outer, values, outside)
            result |= {f"{ours}.{name}": value for name, value in fields.items()}
        return result

    def write(self, config: ModelConfig) -> Values:
        nested = {"full_attention": config.rope, "sliding_attention": config.rope_sliding or config.rope}
        return {"rope_parameters": {kind: self._values(rope) for kind, rope in nested.items()}}

    def _values(self, rope: RopeConfig) -> Values:
        """Return the object that describes `rope`, without the fraction where it and the usual one are the whole."""
        if rope.scaling == _PROPORTIONAL:
            return Rope(partial=1.0).rope_values(rope)
        usual = 1.0 if self.partial is None or rope.scaling != "none" else self.partial
        return Rope(partial=None if rope.rotary_percent == usual == 1.0 else self.partial).rope_values(rope)


def check_nested(values: Any) -> None:
    """Raise CheckpointError for what transformers reads in an object for all layers, and not in one of a layer type."""
    if isinstance(values, dict) and values.get("truncate") is False:
        raise CheckpointError(
            "config.json has truncate = False in the rope parameters of a layer type, where transformers does not read "
            "it; supported: true"
        )


def _overlaid(values: Any, scaling: Any) -> Any:
    """Return rope parameters merged with an old `rope_scaling` that may spell `rope_type` as `type`."""
    if not isinstance(values, dict) or not isinstance(scaling, dict):
        return scaling if isinstance(values, dict) else values  # which is refused
    older = "type" in scaling and "rope_type" not in scaling
    return {name: value for name, value in values.items() if not (older and name == "rope_type")} | scaling


def _read_original_length(hf: HFConfig, values: Values, result: Values, default: int | None) -> None:
    """Fill the length before extension (a field outside wins) and an absent factor, as the lengths imply it."""
    original = read_typed(hf, "original_max_position_embeddings", int, default)
    original = original or read_typed(values, "original_max_position_embeddings", int, None)
    longest = read_typed(hf, "max_position_embeddings", int, None)
    original = longest if original is None else original
    if original is None or (result["factor"] is None and longest is None):
        raise CheckpointError("config.json has no 'max_position_embeddings'")
    if original <= 0:
        raise CheckpointError(f"config.json has original_max_position_embeddings = {original}")
    result["original_max_position_embeddings"] = original
    if result["factor"] is None:
        result["factor"] = longest / original


@dataclass(frozen=True)
class AroundRope:
    """Base of entries that read more, or by other names, than a rotary embedding alone, and write what it does."""

    rope: Rope = Rope()
    names: tuple[str, ...] = Rope.names

    def write(self, config: ModelConfig) -> Values:
        """Return Hugging Face field -> value."""
        return self.rope.write(config)
