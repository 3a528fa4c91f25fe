"""Families with recurrent mixers: which layers have one, what config.json says of it, and how files store it.

An entry of this kind is read after all others; each mixer of a family has a name in the model, and a word for its
layers in `layer_types`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_models.config import (
    GatedDeltaConfig,
    LightningConfig,
    Mamba2Config,
    MambaConfig,
    ModelConfig,
    ShortConvolutionConfig,
)

from ...io.errors import CheckpointError
from ...mapping.blocks import joined
from ...mapping.layout_ops import At, Concat, Layout, Rows, Unsqueezed
from .attentions import Nested
from .fields import REQUIRED, HFConfig, Values, read_typed, shorten_value

Weights = Iterator[tuple[str, Layout]]


@dataclass(frozen=True)
class MixerField:
    """A field of config.json that says a field of a mixer."""

    hf: str
    name: str
    kind: type
    default: Any = REQUIRED

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        """Return fields of the mixer. nested: what the other entries of the family said."""
        return {self.name: read_typed(hf, self.hf, self.kind, self.default)}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        """Return fields of config.json."""
        return {self.hf: getattr(mixer, self.name)}


@dataclass(frozen=True)
class TimeStepLimit(MixerField):
    """`time_step_limit`: the bounds of the time step of Mamba-2; infinity, in one of three spellings, means none."""

    hf: str = "time_step_limit"
    name: str = ""
    kind: type = list

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        limit = hf.get(self.hf)
        limit = [0.0, math.inf] if limit is None else limit
        pair = [_number(value) for value in limit] if isinstance(limit, (list, tuple)) else []
        if len(pair) != 2 or None in pair:
            raise CheckpointError(f"config.json has {self.hf} = {shorten_value(limit)}; allowed: two numbers")
        low, high = pair
        return {"time_step_low": low, "time_step_high": None if high == math.inf else high}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        low, high = mixer.time_step_low, mixer.time_step_high
        infinite: Values = {"__float__": "Infinity"}
        return {} if (low, high) == (0.0, None) else {self.hf: [low, infinite if high is None else high]}


@dataclass(frozen=True)
class TimeStepRank(MixerField):
    """The size of the latent of Mamba's time steps; "auto" means hidden_size by 16, rounded up."""

    name: str = "time_step_rank"
    kind: type = int
    default: Any = "auto"

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        if hf.get(self.hf, "auto") == "auto":
            return {self.name: -(-nested["hidden_size"] // 16)}
        return {self.name: read_typed(hf, self.hf, int, REQUIRED)}


def _number(value: Any) -> float | None:
    value = value.get("__float__") if isinstance(value, dict) else value
    if value in ("Infinity", math.inf):
        return math.inf
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    return float(value) if number else None


@dataclass(frozen=True)
class RecurrentLayers:
    """`layer_types` of layers with attention, and of layers with a recurrent mixer.

    Arguments:
        kind: the mixer's kind, also its name in the model.
        parts: the fields that say it.
        word: of its layers in `layer_types`; the first one is written. attention: of layers with attention.
        pattern: the words of the layers where the file has no `layer_types`.
        fixed: fields of the mixer that config.json does not say.
        hidden_as: the field of the mixer that is hidden_size.
        extra: fields that `pattern` reads, and other names of `layer_types`.
        alone: all layers have the mixer, and no MLP; there are no `layer_types`.
        beside: all layers have the mixer beside attention; there are no `layer_types`.
    """

    kind: str
    parts: tuple[MixerField, ...]
    word: tuple[str, ...] = ("linear_attention",)
    attention: tuple[str, ...] = ("full_attention",)
    pattern: Callable[[Mapping[str, Any], int], list[str]] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    hidden_as: str | None = None
    extra: tuple[str, ...] = ()
    alone: bool = False
    beside: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return ("layer_types", *self.extra, *(part.hf for part in self.parts))

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        layers = nested["num_layers"]
        kinds = [self.word[0]] * layers if self.alone or self.beside else self._words(hf, layers)
        if not set(kinds) & set(self.word):
            return {}
        name = f"attention+{self.kind}" if self.beside else self.kind
        names = [name if kind in self.word else "attention" for kind in kinds]
        found = {"mixers": {self.kind: self.mixer(hf, nested)}, "layer_mixers": names}
        return found | ({"mlp_layers": []} if self.alone else {})

    def mixer(self, hf: HFConfig, nested: Nested) -> Values:
        """Return the mixer's fields, and its kind."""
        mixer: Values = {"kind": self.kind, **self.fixed}
        for part in self.parts:
            mixer |= part.read(hf, nested)
        return mixer | ({} if self.hidden_as is None else {self.hidden_as: nested["hidden_size"]})

    def _words(self, hf: HFConfig, layers: int) -> list[str]:
        known, kinds = (*self.attention, *self.word), read_typed(hf, "layer_types", list, None)
        if kinds is None:
            kinds = [self.attention[0]] * layers if self.pattern is None else self.pattern(hf, layers)
        if len(kinds) != layers or any(kind not in known for kind in kinds):
            raise CheckpointError(
                f"config.json has layer_types = {shorten_value(kinds)} and {layers} layers; allowed for each: "
                f"{', '.join(map(repr, known))}"
            )
        return kinds

    def write(self, config: ModelConfig) -> Values:
        values: Values = {}
        if not (self.alone or self.beside):
            kinds = [config.mixer_of(i) is not None for i in range(config.num_layers)]
            values = {"layer_types": [self.word[0] if recurrent else self.attention[0] for recurrent in kinds]}
        mixer = (config.mixers or {}).get(self.kind)
        for part in () if mixer is None or mixer.kind != self.kind else self.parts:
            values |= part.write(mixer, config)
        return values


def every(period_field: str, period: int) -> Callable[[Mapping[str, Any], int], list[str]]:
    """Return a pattern: of every `period` layers the last has attention."""

    def words(hf: HFConfig, layers: int) -> list[str]:
        n = read_typed(hf, period_field, int, period)
        if n < 1:
            raise CheckpointError(f"config.json has {period_field} = {n}; allowed: a positive integer")
        return ["linear_attention" if (i + 1) % n else "full_attention" for i in range(layers)]

    return words


@dataclass(frozen=True)
class GatedDeltaNames:
    """The gated delta rule with a decay by head. by_key_head: `in_proj_qkvz` and `in_proj_ba` hold the rows of a key
    head, and of the value heads that it serves, one after the other; else there are `in_proj_qkv`, `_z`, `_b`, `_a`."""

    by_key_head: bool = False
    at: str = "linear_attn."

    def weights(self, config: ModelConfig, mixer: GatedDeltaConfig, at: str, ours: str) -> Weights:
        at += self.at
        heads, shared = mixer.num_key_heads, mixer.num_value_heads // mixer.num_key_heads
        K, V = mixer.key_head_dim, shared * mixer.value_head_dim
        yield f"{ours}conv_weight", Unsqueezed(f"{at}conv1d.weight", 1)
        for theirs, name in (("A_log", "A_log"), ("dt_bias", "dt_bias"), ("norm.weight", "norm_weight")):
            yield ours + name, At(at + theirs)
        if self.by_key_head:
            yield f"{ours}linear_in.weight", _of_heads(f"{at}in_proj_qkvz.weight", heads, (K, K, V, V))
            parts = [_of_heads(f"{at}in_proj_ba.weight", heads, (shared, shared), only=part) for part in (0, 1)]
        else:
            first, z = f"{ours}linear_in.weight", At(f"{at}in_proj_z.weight")
            yield first, joined(config, first, (At(f"{at}in_proj_qkv.weight"), 3), z)
            parts = [At(f"{at}in_proj_{name}.weight") for name in "ba"]
        yield f"{ours}step.weight", parts[0]
        yield f"{ours}decay.weight", parts[1]
        yield f"{ours}linear_proj.weight", At(f"{at}out_proj.weight")


def _of_heads(name: str, heads: int, sizes: tuple[int, ...], only: int | None = None) -> Layout:
    """Return the rows of each part, of all heads, one part after the other, of a tensor that holds the parts of the
    first head, then of the second. sizes: rows of a part of one head; only: of one part alone."""
    group = sum(sizes)
    offsets = [sum(sizes[:part]) for part in range(len(sizes))]
    parts = range(len(sizes)) if only is None else (only,)
    return Concat(*((Rows(name, h * group + offsets[p], heads * group), sizes[p]) for p in parts for h in range(heads)))


def _projections(at: str, ours: str, *, bias: bool, output_bias: bool | None = None) -> Weights:
    """The projections into a mixer and out of it. output_bias: None: as bias says."""
    output_bias = bias if output_bias is None else output_bias
    for name, theirs, has_bias in (("linear_in", "in_proj", bias), ("linear_proj", "out_proj", output_bias)):
        for kind in ("weight", "bias") if has_bias else ("weight",):
            yield f"{ours}{name}.{kind}", At(f"{at}{theirs}.{kind}")


@dataclass(frozen=True)
class Mamba2Names:
    """The mixer of Mamba-2. at: what its names begin with, in the layer."""

    at: str = "mamba."

    def weights(self, config: ModelConfig, mixer: Mamba2Config, at: str, ours: str) -> Weights:
        at += self.at
        yield f"{ours}conv_weight", Unsqueezed(f"{at}conv1d.weight", 1)
        if mixer.use_conv_bias:
            yield f"{ours}conv_bias", At(f"{at}conv1d.bias")
        for name in ("A_log", "D", "dt_bias"):
            yield ours + name, At(at + name)
        if mixer.gate != "no_norm":
            yield f"{ours}norm_weight", At(f"{at}norm.weight")
        yield from _projections(at, ours, bias=mixer.use_bias, output_bias=mixer.output_bias)


@dataclass(frozen=True)
class MambaNames:
    """The mixer of Mamba. at: what its names begin with, in the layer; norms: of the latent of the time steps, of B and
    of C, where these have weights."""

    at: str = "mamba."
    norms: tuple[str, ...] = ()

    def weights(self, config: ModelConfig, mixer: MambaConfig, at: str, ours: str) -> Weights:
        at += self.at
        yield f"{ours}conv_weight", Unsqueezed(f"{at}conv1d.weight", 1)
        if mixer.use_conv_bias:
            yield f"{ours}conv_bias", At(f"{at}conv1d.bias")
        for name, theirs in (("A_log", "A_log"), ("D", "D"), ("dt_bias", "dt_proj.bias")):
            yield ours + name, At(at + theirs)
        if mixer.selection_norm == "with_weight":
            for name, theirs in zip(("dt_norm_weight", "B_norm_weight", "C_norm_weight"), self.norms, strict=True):
                yield ours + name, At(f"{at}{theirs}.weight")
        yield f"{ours}selection.weight", At(f"{at}x_proj.weight")
        yield f"{ours}step.weight", At(f"{at}dt_proj.weight")
        yield from _projections(at, ours, bias=mixer.use_bias)


@dataclass(frozen=True)
class LightningNames:
    """Lightning attention: `qkv_proj` holds the rows of q, k and v of the first head, then of the second."""

    at: str = "self_attn."

    def weights(self, config: ModelConfig, mixer: LightningConfig, at: str, ours: str) -> Weights:
        at += self.at
        yield f"{ours}norm_weight", At(f"{at}norm.weight")
        qkv = _of_heads(f"{at}qkv_proj.weight", mixer.num_heads, (mixer.head_dim,) * 3)
        gate = At(f"{at}output_gate.weight")
        yield f"{ours}linear_in.weight", joined(config, f"{ours}linear_in.weight", (qkv, 3), gate)
        yield f"{ours}linear_proj.weight", At(f"{at}out_proj.weight")


@dataclass(frozen=True)
class ShortConvolutionNames:
    """A gated short convolution. at: what its names begin with, in the layer."""

    at: str = "conv."

    def weights(self, config: ModelConfig, mixer: ShortConvolutionConfig, at: str, ours: str) -> Weights:
        at += self.at
        yield f"{ours}conv_weight", Unsqueezed(f"{at}conv.weight", 1)
        if mixer.use_bias:
            yield f"{ours}conv_bias", At(f"{at}conv.bias")
        yield from _projections(at, ours, bias=mixer.use_bias)
