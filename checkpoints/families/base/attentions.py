"""Families with attentions of several kinds in one model: which layers have which, as changes of `attention`.

An entry of this kind is read after all others, because it begins with what they say of `attention`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from te_models.config import ModelConfig

from ...io.errors import CheckpointError
from .fields import REQUIRED, HFConfig, OwnEntry, Values, read_typed, shorten_value

Nested = Mapping[str, Any]
"""A ModelConfig as nested dictionaries."""


class MixerEntry(Protocol):
    """The entry of a configuration map that says the mixers of layers."""

    @property
    def names(self) -> tuple[str, ...]:
        """The Hugging Face fields that this entry understands."""
        ...

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        """Return fields of ModelConfig. nested: what the other entries said."""
        ...

    def write(self, config: ModelConfig) -> Values:
        """Return Hugging Face field -> value."""
        ...


def mixers(nested: Nested, names: Sequence[str], changes: Mapping[str, Values]) -> Values:
    """Return the fields of a model whose layers have attentions of these names: "attention", as the other entries
    describe it, or one of `changes` with what differs from it."""
    used = {name: change for name, change in changes.items() if name in names}
    if not used:
        return {}
    attention = dict(nested["attention"])
    if attention.get("kv_channels") is None and attention.get("mla") is None:
        attention["kv_channels"] = nested["hidden_size"] // attention["num_attention_heads"]
    found = {name: {"kind": "attention", **attention, **change} for name, change in used.items()}
    return {"mixers": found, "layer_mixers": list(names)}


def read_list(hf: HFConfig, name: str, kind: type) -> list[Any] | None:
    """Return a list with a value for each layer; None for attention without one. CheckpointError for another number,
    and for values that are none."""
    values = read_typed(hf, name, list, None)
    layers = read_typed(hf, "num_hidden_layers", int, REQUIRED)
    if values is not None and len(values) != layers:
        raise CheckpointError(f"config.json has {len(values)} {name} and {layers} layers")
    return None if values is None else [read_typed({name: value}, name, kind, REQUIRED) for value in values]


@dataclass(frozen=True)
class SlidingAttention:
    """Sliding layers have another attention than full layers. changes: in which fields, from the one
    of full layers."""

    changes: Callable[[Nested], Values]
    names: tuple[str, ...] = ()

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        names = ["sliding" if kind == "sliding" else "attention" for kind in nested["layer_types"]]
        return mixers(nested, names, {"sliding": self.changes(nested["attention"])})

    def write(self, config: ModelConfig) -> Values:
        return {}


class HeadsPerLayer(OwnEntry):
    """`num_attention_heads_per_layer`: as many query heads in each layer, in place of `num_attention_heads`."""

    names = ("num_attention_heads_per_layer",)

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        heads = read_list(hf, "num_attention_heads_per_layer", int) or []
        usual = nested["attention"]["num_attention_heads"]
        names = ["attention" if number == usual else f"heads_{number}" for number in heads]
        return mixers(nested, names, {name: {"num_attention_heads": n} for name, n in zip(names, heads) if n != usual})

    def write(self, config: ModelConfig) -> Values:
        attentions = [config.attention_of(i) or config.attention for i in range(config.num_layers)]
        return {"num_attention_heads_per_layer": [attention.num_attention_heads for attention in attentions]}


class RopeThetaPerLayer(OwnEntry):
    """`layer_rope_theta`: the base of the rotary embedding of each layer, 0 in layers without one; absent: the model's
    in all. It is written with `layer_types`."""

    names = ("layer_rope_theta",)

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        thetas = read_list(hf, "layer_rope_theta", float)
        if thetas is None:
            return {}
        if any(theta < 0 for theta in thetas):
            raise CheckpointError(f"config.json has layer_rope_theta = {shorten_value(thetas)}; allowed: 0 or more")
        usual, sliding = nested["rope"]["rotary_base"], [kind == "sliding" for kind in nested["layer_types"]]
        bases = [usual if theta == 0 else theta for theta in thetas]
        others = [base for base in dict.fromkeys(bases) if base != usual]
        names = {usual: "attention", **{base: f"rope_{number}" for number, base in enumerate(others, 2)}}
        kinds = [
            ("sliding" if slides else "full") if theta else ("sliding_nope" if slides else "nope")
            for slides, theta in zip(sliding, thetas, strict=True)
        ]
        changes = {names[base]: {"rope": nested["rope"] | {"rotary_base": base}} for base in others}
        return {"layer_types": kinds, **mixers(nested, [names[base] for base in bases], changes)}

    def write(self, config: ModelConfig) -> Values:
        ropes = [config.rope_of(i) for i in range(config.num_layers)]
        sliding = [config.layer_type(i).startswith("sliding") for i in range(config.num_layers)]
        return {
            "layer_rope_theta": [0 if rope is None else rope.rotary_base for rope in ropes],
            "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        }
