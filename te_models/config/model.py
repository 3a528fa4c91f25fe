"""The whole model: how its parts fit together, its norms and its embedding."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from .attention import AttentionConfig
from .mlp import MLPConfig, MoEConfig
from .part import ConfigError, ConfigPart, check
from .rope import RopeConfig

LayerType = Literal["full", "sliding", "chunked", "nope", "sliding_nope", "chunked_nope"]
"""What the queries of a layer see; "nope" of the whole past, and the others so named, without position encoding."""


MAX_MTP_LAYERS = 16
"""More than any model has; published ones have 1 or 3."""
MAX_LAYERS = 2_000
"""Far more than any model has: the kinds of all layers are a tuple, and a checkpoint has tensors of every layer, which
are counted before anything else looks at them."""


@dataclass(frozen=True, kw_only=True)
class NormConfig(ConfigPart):
    """Normalisation of the residual stream.

    cast_order decides bf16 bits: "weight_last" is `w * x_hat.to(dtype)`, "weight_first" `(w * x_hat).to(dtype)` in
    float32.
    """

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Kind of norm."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance or the mean square."""
    layernorm_zero_centered_gamma: bool = False
    """Whether the stored weight is the factor minus 1."""
    cast_order: Literal["weight_last", "weight_first"] = "weight_last"
    """Whether a low-precision result is rounded before the weight multiplies it (weight_last) or after."""
    has_weight: bool = True
    """Whether the norm has a weight."""
    bias: bool = False
    """Whether a LayerNorm has a bias."""

    def _validate(self) -> None:
        check(self.layernorm_epsilon > 0, "norm.layernorm_epsilon", self.layernorm_epsilon, "a positive number")
        check(not (self.bias and self.normalization == "RMSNorm"), "norm.bias", self.bias, "false with RMSNorm")
        check(self.has_weight or not self.bias, "norm.bias", self.bias, "false when norm.has_weight is false")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(ConfigPart):
    """Token embedding and output layer."""

    share_embeddings_and_output_weights: bool = False
    """Whether the output layer uses the weight of the token embedding."""
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    """How positions enter: rotary embedding, a learned vector for each position, or not at all."""
    multiplier: float | Literal["sqrt_hidden_in_weight_dtype"] = 1.0
    """Factor of the embeddings; sqrt_hidden_in_weight_dtype is sqrt(hidden_size), rounded to the weight's dtype."""
    logits_multiplier: float = 1.0
    """Factor of the logits."""
    logits_softcap: float | None = None
    """Bound of the tanh soft cap of the logits; unset means none."""
    output_bias: bool = False
    """Whether the output layer has a bias."""
    embedding_dropout: float | None = None
    """Probability with which embeddings are dropped in training; unset means hidden_dropout, as in Megatron-Core."""
    padding_idx: int | None = None
    """Token whose embedding gets no gradient from the input, as of torch's and transformers' embeddings; unset means
    none."""

    _LATER: ClassVar[frozenset[str]] = frozenset({"embedding_dropout", "padding_idx"})

    def _validate(self) -> None:
        cap, p = self.logits_softcap, self.embedding_dropout
        check(cap is None or cap > 0, "embedding.logits_softcap", cap, "a positive number or null")
        check(p is None or 0 <= p < 1, "embedding.embedding_dropout", p, "0 <= p < 1, or null")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigPart):
    """A GPT or MoE language model.

    Example:
        ModelConfig(vocab_size=49152, hidden_size=576, num_layers=30, max_position_embeddings=8192,
                    attention=AttentionConfig(num_attention_heads=9, num_query_groups=3),
                    mlp=MLPConfig(ffn_hidden_size=1536))

    What is derived where it is None (`layer_types`, `moe.layers`, `attention`'s `kv_channels`) is filled in, and
    derived again by `replace`: `config.replace(num_layers=4)` has 4 layer types.
    """

    vocab_size: int
    """Number of tokens that the embedding and the output layer know."""
    hidden_size: int
    """Channels of the residual stream."""
    num_layers: int
    """Number of layers."""
    max_position_embeddings: int
    """Longest sequence, in tokens."""
    attention: AttentionConfig
    """Self attention of every layer."""
    mlp: MLPConfig
    """MLP of the dense layers."""
    norm: NormConfig = field(default_factory=NormConfig)
    """Norms of the residual stream."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary position embedding."""
    rope_sliding: RopeConfig | None = None
    """Rotary position embedding of sliding layers; unset means the other layers' one."""
    moe: MoEConfig | None = None
    """Mixture of experts; unset means a dense model."""
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    """Token embedding and output layer."""
    block: Literal["pre", "post", "sandwich", "parallel", "parallel_shared_norm"] = "pre"
    """Where the norms are: before each sublayer (pre), after it (post), both (sandwich), or attention and MLP side
    by side with two norms (parallel) or one (parallel_shared_norm)."""
    layer_types: tuple[LayerType, ...] | None = None
    """What the queries of each layer see; unset means all full, or all sliding where attention.window_size is set."""
    residual_multiplier: float = 1.0
    """Factor of what each sublayer adds to the residual stream."""
    hidden_dropout: float = 0.0
    """Probability with which the output of a sublayer is dropped in training, attention and MLP each by itself."""
    init_method_std: float = 0.02
    """Standard deviation of random initial weights."""
    mtp_num_layers: int = 0
    """Number of layers behind the model that predict further tokens, one more ahead each (multi-token prediction)."""
    mtp_loss_scaling_factor: float = 0.1
    """Factor of the mean loss of these layers in the loss that training minimises."""

    def _derivations(self) -> dict[str, Any]:
        kind: LayerType = "sliding" if self.attention.window_size is not None else "full"
        values: dict[str, Any] = {"layer_types": (kind,) * self.num_layers}
        if self.attention.mla is None:
            size, rest = divmod(self.hidden_size, self.attention.num_attention_heads)
            values["attention.kv_channels"] = None if rest else size
        if self.moe is not None:
            values["moe.layers"] = tuple(range(self.num_layers))
        return values

    def _validate(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_position_embeddings"):
            check(getattr(self, name) > 0, name, getattr(self, name), "a positive integer")
        check(self.num_layers <= MAX_LAYERS, "num_layers", self.num_layers, f"at most {MAX_LAYERS}")
        heads = self.attention.num_attention_heads
        self._fill()
        check(
            self.attention.kv_channels is not None,
            "attention.kv_channels",
            None,
            f"a number, because hidden_size = {self.hidden_size} is not a multiple of {heads} heads",
        )
        bias = self.attention.qk_layernorm_bias and self.norm.normalization == "RMSNorm"
        check(not bias, "attention.qk_layernorm_bias", True, "false with RMSNorm")
        channels = self.rope_channels
        for name, rope in (("rope", self.rope), ("rope_sliding", self.rope_sliding)):
            if self.embedding.position_embedding_type == "rope" and rope is not None:
                rotated = int(channels * rope.rotary_percent)
                check(
                    rotated > 0 and rotated % 2 == 0,
                    f"{name}.rotary_percent",
                    rope.rotary_percent,
                    f"a fraction that rotates an even number of the {channels} head channels",
                )
                for factors in ("short_factor", "long_factor"):
                    number = len(getattr(rope, factors) or ()) or None
                    allowed = f"{rotated // 2}, one for each pair of the {rotated} channels that are rotated"
                    check(number in (None, rotated // 2), f"the number of {name}.{factors}", number, allowed)
        kinds = self.layer_types or ()
        check(
            len(kinds) == self.num_layers, "layer_types", kinds, f"one entry for each of the {self.num_layers} layers"
        )
        for seen, name in (("sliding", "window_size"), ("chunked", "chunk_size")):
            of_kind = [kind for kind in kinds if kind.startswith(seen)]
            has_size = not of_kind or getattr(self.attention, name) is not None
            check(
                has_size, f"attention.{name}", None, f"a size, because layer_types has {''.join(of_kind[:1])!r} layers"
            )
        check(0 <= self.hidden_dropout < 1, "hidden_dropout", self.hidden_dropout, "0 <= p < 1")
        pad, last = self.embedding.padding_idx, self.vocab_size - 1
        check(pad is None or 0 <= pad <= last, "embedding.padding_idx", pad, f"0 to {last}, or null")
        check(self.init_method_std >= 0, "init_method_std", self.init_method_std, "zero or a positive number")
        check(
            0 <= self.mtp_num_layers <= MAX_MTP_LAYERS, "mtp_num_layers", self.mtp_num_layers, f"0 to {MAX_MTP_LAYERS}"
        )
        learned = self.mtp_num_layers > 0 and self.embedding.position_embedding_type == "learned_absolute"
        check(not learned, "mtp_num_layers", self.mtp_num_layers, "0 with learned positions")
        check(self.mtp_loss_scaling_factor > 0, "mtp_loss_scaling_factor", self.mtp_loss_scaling_factor, "above 0")
        if self.moe is not None:
            layers = self.moe.layers or ()
            post = self.moe.post_layernorm
            check(self.block == "pre" or not post, "moe.post_layernorm", post, "false unless block is 'pre'")
            ordered = list(layers) == sorted(set(layers)) and all(0 <= i < self.num_layers for i in layers)
            check(ordered, "moe.layers", layers, f"increasing layer indices below num_layers = {self.num_layers}")

    @property
    def embedding_dropout(self) -> float:
        """Probability with which embeddings are dropped in training."""
        p = self.embedding.embedding_dropout
        return self.hidden_dropout if p is None else p

    def layer_type(self, layer: int) -> LayerType:
        """The attention kind of layer number `layer` (from 0)."""
        assert self.layer_types is not None, "filled in by validation"
        return self.layer_types[layer]

    def window_size(self, layer: int) -> int | None:
        """Positions that a query of layer number `layer` sees, its own included; None: all before it."""
        return self.attention.window_size if self.layer_type(layer).startswith("sliding") else None

    def chunk_size(self, layer: int) -> int | None:
        """Positions of the chunks that hide each other in layer number `layer`; None: there are no chunks."""
        return self.attention.chunk_size if self.layer_type(layer).startswith("chunked") else None

    def rotates(self, layer: int) -> bool:
        """Whether layer number `layer` has position encoding, if layers have."""
        return not self.layer_type(layer).endswith("nope")

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
        if self.embedding.position_embedding_type != "rope" or not self.rotates(layer):
            return None
        sliding = self.layer_type(layer) == "sliding"
        return self.rope_sliding if sliding and self.rope_sliding is not None else self.rope

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
