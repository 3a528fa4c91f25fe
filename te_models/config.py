"""The model configuration: one frozen value that says everything about a model's mathematics.

Why one generic configuration: every supported family is a choice of the same few parts (norm, attention, rotary
embedding, MLP, mixture of experts, residual block), so a family is a value of this class, never a model class.
Megatron-Core's field names are used where it has one. Alternatives rejected: one class per family (the parts drift
apart), a flat class (60 fields whose dependencies nobody can check).

A leaf module: it imports nothing of the project, so every folder may read it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, Self

LayerType = Literal["full", "sliding", "chunked", "nope"]


class ConfigError(ValueError):
    """A configuration field has a value that is not allowed; the message names the field, the value and the choice."""


def check(condition: bool, where: str, value: object, allowed: str) -> None:
    """Raise ConfigError, naming the field `where`, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{where} is {value!r}; allowed: {allowed}")


@dataclass(frozen=True, kw_only=True)
class ConfigPart:
    """Base of all configuration parts: exact dictionary round trip, and type checks on construction."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            object.__setattr__(
                self, f.name, _coerce(f"{type(self).__name__}.{f.name}", getattr(self, f.name), hints[f.name])
            )
        self._validate()

    def _validate(self) -> None:
        """Check relations between fields; raise ConfigError."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: dict, list, str, int, float, bool, None."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild from `to_dict`. An unknown or missing field raises ConfigError by name."""
        check(isinstance(values, dict), cls.__name__, values, "an object of named fields")
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no field {name!r}; its fields are: {', '.join(sorted(known))}")
        for name, f in known.items():
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and name not in values:
                raise ConfigError(f"{cls.__name__} needs the field {name!r}")
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the named fields changed, validated again."""
        return dataclasses.replace(self, **changes)


def _plain(value: Any) -> Any:
    if isinstance(value, ConfigPart):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _coerce(where: str, value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type (lists become tuples, dicts become parts) or raise ConfigError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors = []
        for option in (a for a in args if a is not type(None)):
            try:
                return _coerce(where, value, option)
            except ConfigError as error:
                errors.append(str(error))
        raise ConfigError(errors[0])
    if origin is Literal:
        check(value in args and type(value) in {type(a) for a in args}, where, value, ", ".join(map(repr, args)))
        return value
    if origin is tuple:
        check(isinstance(value, (list, tuple)), where, value, "a list")
        return tuple(_coerce(f"{where}[{i}]", v, args[0]) for i, v in enumerate(value))
    if isinstance(hint, type) and issubclass(hint, ConfigPart):
        return hint.from_dict(value) if isinstance(value, dict) else _expect(where, value, hint)
    if hint is float:
        check(isinstance(value, (int, float)) and not isinstance(value, bool), where, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        check(math.isfinite(number), where, value, "a finite number")
        return number
    if hint is int:
        check(isinstance(value, int) and not isinstance(value, bool), where, value, "an integer")
        return value
    return _expect(where, value, hint)


def _expect(where: str, value: Any, hint: type) -> Any:
    check(isinstance(value, hint), where, value, f"a {hint.__name__}")
    return value


@dataclass(frozen=True, kw_only=True)
class NormConfig(ConfigPart):
    """Normalisation of the residual stream.

    cast_order is where the product with gamma is rounded for a low-precision input (it decides bf16 bits):
    "weight_last" `w * x_hat.to(dtype)`, "weight_first" `(w * x_hat).to(dtype)` in float32.
    """

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    cast_order: Literal["weight_last", "weight_first"] = "weight_last"
    has_weight: bool = True
    bias: bool = False

    def _validate(self) -> None:
        check(self.layernorm_epsilon > 0, "norm.layernorm_epsilon", self.layernorm_epsilon, "a positive number")
        check(not (self.bias and self.normalization == "RMSNorm"), "norm.bias", self.bias, "false with RMSNorm")
        check(self.has_weight or not self.bias, "norm.bias", self.bias, "false when norm.has_weight is false")


@dataclass(frozen=True, kw_only=True)
class MLAConfig(ConfigPart):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434). `q_lora_rank` None means a plain query projection."""

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    latent_norm_epsilon: float = 1e-6

    def _validate(self) -> None:
        check(self.q_lora_rank is None or self.q_lora_rank > 0, "mla.q_lora_rank", self.q_lora_rank, "positive or null")
        for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            check(getattr(self, name) > 0, f"mla.{name}", getattr(self, name), "a positive integer")


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig(ConfigPart):
    """Queries times `1 + attn_scale * log(1 + floor((position + position_offset) / floor_scale))`, so that attention
    stays sharp over long contexts (arXiv 2501.19399). Llama 4 does so in its "nope" layers, Ministral 3 in all."""

    floor_scale: float
    attn_scale: float
    position_offset: int = 0
    layers: Literal["nope", "all"] = "all"

    def _validate(self) -> None:
        check(self.floor_scale > 0, "temperature.floor_scale", self.floor_scale, "a positive number")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ConfigPart):
    """Self attention. `kv_channels` is the head dimension; `num_query_groups` the number of key/value heads (GQA).

    `window_size` counts visible positions, the query's own included, in "sliding" layers; `chunk_size` likewise in
    "chunked" ones. `softmax_scale` None means 1/sqrt(head dim). `softcap` is tanh soft-capping of the scores.
    `qk_layernorm`: an RMSNorm of each "head" of q and k, of all of them together ("full"), or of each head without
    weight ("l2", only in layers with a position encoding); `clip_qkv` clamps q, k and v behind it. With `mla`,
    `kv_channels` and `v_head_dim` follow from it.
    """

    num_attention_heads: int
    num_query_groups: int | None = None
    kv_channels: int | None = None
    v_head_dim: int | None = None
    add_qkv_bias: bool = False
    add_output_bias: bool = False
    qk_layernorm: Literal["none", "head", "full", "l2"] = "none"
    qk_layernorm_after_rope: bool = False
    softmax_scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    output_gate: bool = False
    clip_qkv: float | None = None
    window_size: int | None = None
    chunk_size: int | None = None
    temperature_tuning: TemperatureConfig | None = None
    attention_dropout: float = 0.0
    mla: MLAConfig | None = None

    def _validate(self) -> None:
        heads = self.num_attention_heads
        check(heads > 0, "attention.num_attention_heads", heads, "a positive integer")
        groups = heads if self.num_query_groups is None else self.num_query_groups
        object.__setattr__(self, "num_query_groups", groups)
        divides = 0 < groups <= heads and heads % groups == 0
        check(divides, "attention.num_query_groups", groups, f"a divisor of num_attention_heads = {heads}")
        for name in ("kv_channels", "v_head_dim", "window_size", "chunk_size"):
            value = getattr(self, name)
            check(value is None or value > 0, f"attention.{name}", value, "a positive integer or null")
        for name in ("softmax_scale", "softcap", "clip_qkv"):
            value = getattr(self, name)
            check(value is None or value > 0, f"attention.{name}", value, "a positive number or null")
        if self.mla is not None:
            object.__setattr__(self, "kv_channels", self.mla.qk_head_dim + self.mla.qk_pos_emb_head_dim)
            object.__setattr__(self, "v_head_dim", self.mla.v_head_dim)
            plain = self.qk_layernorm == "none" and groups == heads and not self.sinks and self.clip_qkv is None
            check(plain, "attention.mla", self.mla, "null with grouped queries, qk_layernorm, sinks or clip_qkv")
            biased = self.add_qkv_bias and self.mla.q_lora_rank is None
            check(not biased, "attention.add_qkv_bias", True, "false where mla.q_lora_rank is null")
        check(0 <= self.attention_dropout < 1, "attention.attention_dropout", self.attention_dropout, "0 <= p < 1")


@dataclass(frozen=True, kw_only=True)
class RopeConfig(ConfigPart):
    """Rotary position embedding (arXiv 2104.09864) and its context extensions.

    `style`: "half" rotates (i, i + D/2), "interleaved" rotates (2i, 2i + 1). `rotary_percent` is the rotated fraction
    of the head dimension. `scaling` names the extension; the fields under it are read only by that extension, and a
    field set for another one is refused.
    """

    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    style: Literal["half", "interleaved"] = "half"
    scaling: Literal["none", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"] = "none"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None
    alpha: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    _FIELDS_OF: typing.ClassVar[dict[str, tuple[set[str], set[str]]]] = {
        # scaling: (required, optional)
        "none": (set(), set()),
        "linear": ({"factor"}, set()),
        "dynamic": (set(), {"factor", "alpha", "original_max_position_embeddings"}),
        "yarn": (
            {"factor"},
            {
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "attention_factor",
                "truncate",
            },
        ),
        "longrope": (
            {"short_factor", "long_factor"},
            {"factor", "original_max_position_embeddings", "attention_factor"},
        ),
        "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
        "proportional": (set(), {"factor"}),
    }

    def _validate(self) -> None:
        check(self.rotary_base > 0, "rope.rotary_base", self.rotary_base, "a positive number")
        check(0 < self.rotary_percent <= 1, "rope.rotary_percent", self.rotary_percent, "0 < fraction <= 1")
        required, optional = self._FIELDS_OF[self.scaling]
        every = set().union(*(r | o for r, o in self._FIELDS_OF.values()))
        for name in sorted(every):
            value = getattr(self, name)
            if name in required:
                check(value is not None, f"rope.{name}", value, f"a value, because rope.scaling is {self.scaling!r}")
            elif name not in optional:
                check(value is None, f"rope.{name}", value, f"null, because rope.scaling is {self.scaling!r}")
        check(self.factor is None or self.factor > 0, "rope.factor", self.factor, "a positive number")


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ConfigPart):
    """The feed-forward part. `gated`: `act(gate) * up`, fc1 rows are [gate | up].

    `clamp`, `alpha`, `up_offset` are gpt-oss's clamped SwiGLU: gate <= clamp, |up| <= clamp,
    `gate * sigmoid(alpha * gate) * (up + up_offset)`.
    """

    ffn_hidden_size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu"] = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def _validate(self) -> None:
        check(self.ffn_hidden_size > 0, "mlp.ffn_hidden_size", self.ffn_hidden_size, "a positive integer")
        check(self.clamp is None or self.clamp > 0, "mlp.clamp", self.clamp, "a positive number or null")


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ConfigPart):
    """How tokens choose experts.

    `score`: "softmax" or "sigmoid" of the logits; `score_after_topk` applies it to the k selected logits only.
    `expert_bias` adds a learned or buffered per-expert term to the scores for selection only (DeepSeek-V3).
    `linear_bias` is an ordinary bias of the router projection. `normalize` divides the k probabilities by their sum
    (plus `normalize_eps`). `num_groups`/`topk_groups` restrict the choice to the best groups, a group's value being
    the "max" or the "top2_sum" of its scores. `apply_on_input` multiplies the expert's input instead of its output.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    score_after_topk: bool = False
    expert_bias: bool = False
    linear_bias: bool = False
    normalize: bool = True
    normalize_eps: float = 0.0
    scaling_factor: float = 1.0
    num_groups: int | None = None
    topk_groups: int | None = None
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    dtype: Literal["input", "float32"] = "input"
    apply_on_input: bool = False

    def _validate(self) -> None:
        both = (self.num_groups is None) == (self.topk_groups is None)
        check(both, "router.topk_groups", self.topk_groups, "set exactly when router.num_groups is set")
        if self.num_groups is not None and self.topk_groups is not None:
            inside = 0 < self.topk_groups <= self.num_groups
            check(inside, "router.topk_groups", self.topk_groups, f"1..num_groups = {self.num_groups}")


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ConfigPart):
    """A mixture of experts. `layers` lists the indices of MoE layers (None: all); the others are dense.

    `shared_expert_intermediate_size` None means no shared expert; `shared_expert_gate` multiplies its output by the
    sigmoid of a one-row projection of the input. `aux_loss_coeff` is the load-balancing loss weight (arXiv 2101.03961),
    `z_loss_coeff` the router z-loss weight (arXiv 2202.08906).
    """

    num_moe_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    layers: tuple[int, ...] | None = None
    bias: bool = False
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    router: RouterConfig = field(default_factory=RouterConfig)

    def _validate(self) -> None:
        experts = self.num_moe_experts
        check(experts > 0, "moe.num_moe_experts", experts, "a positive integer")
        check(
            0 < self.moe_router_topk <= experts,
            "moe.moe_router_topk",
            self.moe_router_topk,
            f"1..num_moe_experts = {experts}",
        )
        check(self.moe_ffn_hidden_size > 0, "moe.moe_ffn_hidden_size", self.moe_ffn_hidden_size, "a positive integer")
        shared = self.shared_expert_intermediate_size
        check(shared is None or shared > 0, "moe.shared_expert_intermediate_size", shared, "a positive integer or null")
        check(
            shared is not None or not self.shared_expert_gate,
            "moe.shared_expert_gate",
            self.shared_expert_gate,
            "false without a shared expert",
        )
        groups = self.router.num_groups
        check(
            groups is None or experts % groups == 0,
            "router.num_groups",
            groups,
            f"a divisor of num_moe_experts = {experts}",
        )


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(ConfigPart):
    """Token embedding and output layer. `multiplier` scales embeddings; "sqrt_hidden_in_weight_dtype" is Gemma's."""

    share_embeddings_and_output_weights: bool = False
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    multiplier: float | Literal["sqrt_hidden_in_weight_dtype"] = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None
    output_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigPart):
    """A GPT or MoE language model.

    Example:
        ModelConfig(vocab_size=49152, hidden_size=576, num_layers=30, max_position_embeddings=8192,
                    attention=AttentionConfig(num_attention_heads=9, num_query_groups=3),
                    mlp=MLPConfig(ffn_hidden_size=1536))

    `block`: "pre" (norm before each sublayer), "post" (after it), "sandwich" (both), "parallel" (attention and MLP
    side by side, two norms), "parallel_shared_norm" (side by side, one norm). `layer_types` gives one attention kind
    per layer (None: all "full", or all "sliding" when `attention.window_size` is set); `rope_sliding` replaces `rope`
    in "sliding" layers (Gemma 3, OLMo 3).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    attention: AttentionConfig
    mlp: MLPConfig
    norm: NormConfig = field(default_factory=NormConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    rope_sliding: RopeConfig | None = None
    moe: MoEConfig | None = None
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    block: Literal["pre", "post", "sandwich", "parallel", "parallel_shared_norm"] = "pre"
    layer_types: tuple[LayerType, ...] | None = None
    residual_multiplier: float = 1.0
    hidden_dropout: float = 0.0
    init_method_std: float = 0.02

    def _validate(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_position_embeddings"):
            check(getattr(self, name) > 0, name, getattr(self, name), "a positive integer")
        heads = self.attention.num_attention_heads
        if self.attention.kv_channels is None:
            check(
                self.hidden_size % heads == 0,
                "attention.kv_channels",
                None,
                f"a number, because hidden_size = {self.hidden_size} is not a multiple of {heads} heads",
            )
            object.__setattr__(self, "attention", self.attention.replace(kv_channels=self.hidden_size // heads))
        channels = self.attention.kv_channels or 0
        rotary = round(channels * self.rope.rotary_percent)
        if self.embedding.position_embedding_type == "rope" and self.attention.mla is None:
            check(
                rotary % 2 == 0,
                "rope.rotary_percent",
                self.rope.rotary_percent,
                f"a fraction that rotates an even number of the {channels} head channels",
            )
        kind: LayerType = "sliding" if self.attention.window_size is not None else "full"
        kinds = (kind,) * self.num_layers if self.layer_types is None else self.layer_types
        object.__setattr__(self, "layer_types", kinds)
        check(
            len(kinds) == self.num_layers, "layer_types", kinds, f"one entry for each of the {self.num_layers} layers"
        )
        for layer_type, name in (("sliding", "window_size"), ("chunked", "chunk_size")):
            given = layer_type not in kinds or getattr(self.attention, name) is not None
            check(given, f"attention.{name}", None, f"a size, because layer_types has {layer_type!r} layers")
        check(0 <= self.hidden_dropout < 1, "hidden_dropout", self.hidden_dropout, "0 <= p < 1")
        if self.moe is not None:
            every = tuple(range(self.num_layers))
            layers = every if self.moe.layers is None else self.moe.layers
            ordered = list(layers) == sorted(set(layers)) and set(layers) <= set(every)
            check(ordered, "moe.layers", layers, f"increasing layer indices below num_layers = {self.num_layers}")
            object.__setattr__(self, "moe", self.moe.replace(layers=layers))

    def layer_type(self, layer: int) -> LayerType:
        """The attention kind of layer number `layer` (from 0)."""
        assert self.layer_types is not None, "filled in by validation"
        return self.layer_types[layer]

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) has experts."""
        return self.moe is not None and layer in (self.moe.layers or ())

    @property
    def rope_channels(self) -> int:
        """Channels per head that `rope.rotary_percent` counts: all of them, with `attention.mla` the rotated part."""
        mla = self.attention.mla
        assert self.attention.kv_channels is not None, "filled in by validation"
        return self.attention.kv_channels if mla is None else mla.qk_pos_emb_head_dim

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of layer number `layer`; None where the layer has no position encoding."""
        kind = self.layer_type(layer)
        if self.embedding.position_embedding_type != "rope" or kind == "nope":
            return None
        return self.rope_sliding if kind == "sliding" and self.rope_sliding is not None else self.rope

    def to_json(self) -> str:
        """Return the configuration as indented JSON with sorted keys; `from_json` restores an equal value."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild from `to_json`; malformed JSON raises ConfigError."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the model configuration is not valid JSON: {error}") from None
        return cls.from_dict(values)
