"""Configuration maps: Hugging Face's config.json <-> `ModelConfig`, as small values that read and write.

A map is a tuple of entries. Each reads some Hugging Face fields into flat `ModelConfig` paths ("attention.kv_channels")
and writes them back. Reading follows transformers: a field that is absent has the class's default, which is part of the
entry, because files of older releases leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from te_models.config import ModelConfig

from ..errors import CheckpointError

Values = dict[str, Any]
REQUIRED: Any = object()


class Entry(Protocol):
    """One entry of a configuration map."""

    @property
    def names(self) -> tuple[str, ...]:
        """The Hugging Face fields that this entry understands."""
        ...

    def read(self, hf: Mapping[str, Any]) -> Values:
        """Return ModelConfig path -> value; paths may be left out to keep ModelConfig's default."""
        ...

    def write(self, config: ModelConfig) -> Values:
        """Return Hugging Face field -> value."""
        ...


def get_path(config: Any, path: str) -> Any:
    """Return the value at a dotted path of a configuration, None below an absent part."""
    for name in path.split("."):
        config = getattr(config, name) if config is not None else None
    return config


def read_typed(hf: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return field `name` as `kind`; `default` where it is absent.

    A default of REQUIRED makes absence an error; a default of None allows null as well.
    """
    value = hf.get(name, default)
    if value is REQUIRED:
        raise CheckpointError(f"config.json has no {name!r}")
    if value is None and (default is None or name not in hf):
        return None
    if kind is float and isinstance(value, int) and abs(value) < 2**53:
        value = value if isinstance(value, bool) else float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"config.json has {name} = {shorten_value(value)}, which is not {_KIND_NAMES[kind]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"config.json has {name} out of range")
    return value


def shorten_value(value: Any) -> str:
    """Return a value for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


_KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list"}


@dataclass(frozen=True)
class Field:
    """A field that means the same on both sides. `default` None also allows null: ModelConfig's own default."""

    hf: str
    path: str
    kind: type
    default: Any = REQUIRED

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hf,)

    def read(self, hf: Mapping[str, Any]) -> Values:
        value = read_typed(hf, self.hf, self.kind, self.default)
        return {} if value is None else {self.path: value}

    def write(self, config: ModelConfig) -> Values:
        return {self.hf: get_path(config, self.path)}


@dataclass(frozen=True)
class Fixed:
    """A property that every model of the family has and config.json does not mention."""

    path: str
    value: Any
    names: tuple[str, ...] = ()

    def read(self, hf: Mapping[str, Any]) -> Values:
        return {self.path: self.value}

    def write(self, config: ModelConfig) -> Values:
        return {}


@dataclass(frozen=True)
class Choice:
    """A field whose values have other names; the first name of a value is the one written."""

    hf: str
    path: str
    values: dict[str, str]
    default: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hf,)

    def read(self, hf: Mapping[str, Any]) -> Values:
        value = read_typed(hf, self.hf, str, self.default)
        if value not in self.values:
            raise CheckpointError(
                f"config.json has {self.hf} = {shorten_value(value)}; supported: {', '.join(self.values)}"
            )
        return {self.path: self.values[value]}

    def write(self, config: ModelConfig) -> Values:
        inverse = {ours: theirs for theirs, ours in reversed(self.values.items())}
        return {self.hf: inverse.get(get_path(config, self.path))}


@dataclass(frozen=True)
class AllLayersWindow:
    """`sliding_window` (Mistral): every layer sees that many positions; null means full attention."""

    default: int | None
    enabled_by: str | None = None
    names: tuple[str, ...] = field(default=("sliding_window", "use_sliding_window"))

    def read(self, hf: Mapping[str, Any]) -> Values:
        if self.enabled_by is not None and not read_typed(hf, self.enabled_by, bool, False):
            return {}
        window = hf.get("sliding_window", self.default)
        if window is None:
            return {}
        return {"attention.window_size": read_typed(hf, "sliding_window", int, self.default)}

    def write(self, config: ModelConfig) -> Values:
        window = config.attention.window_size
        return {"sliding_window": window} | ({self.enabled_by: window is not None} if self.enabled_by else {})


_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}


@dataclass(frozen=True)
class PerLayerWindow:
    """Qwen's window: used when `use_sliding_window`, in the layers that `layer_types` or `max_window_layers` say."""

    default: int = 4096
    default_full_layers: int = 28
    names: tuple[str, ...] = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def read(self, hf: Mapping[str, Any]) -> Values:
        used = read_typed(hf, "use_sliding_window", bool, False) and hf.get("sliding_window", self.default) is not None
        window = read_typed(hf, "sliding_window", int, self.default) if used else None
        types = read_typed(hf, "layer_types", list, None)
        if types is None:
            full_layers = read_typed(hf, "max_window_layers", int, self.default_full_layers)
            layers = read_typed(hf, "num_hidden_layers", int, REQUIRED)
            kinds = ["sliding" if used and i >= full_layers else "full" for i in range(layers)]
        else:
            unknown = [t for t in types if not isinstance(t, str) or t not in _LAYER_TYPES]
            if unknown:
                raise CheckpointError(
                    f"config.json has the layer type {shorten_value(unknown[0])}; supported: {', '.join(_LAYER_TYPES)}"
                )
            kinds = [_LAYER_TYPES[t] for t in types]
        if "sliding" in kinds and window is None:
            raise CheckpointError("config.json has sliding_attention layers, but use_sliding_window is not true")
        return {"layer_types": kinds} | ({} if window is None else {"attention.window_size": window})

    def write(self, config: ModelConfig) -> Values:
        inverse = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}
        kinds = config.layer_types or ()
        window = config.attention.window_size
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": next((i for i, kind in enumerate(kinds) if kind == "sliding"), config.num_layers),
            "layer_types": [inverse.get(kind, kind) for kind in kinds],
        }
