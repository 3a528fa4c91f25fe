"""Self attention: grouped queries, windows, normalised queries and keys, latent attention, temperatures."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..part import ConfigPart, check
from ..rope import RopeConfig
from .base import MixerConfig, State
from .compressed import CompressedConfig
from .indexer import IndexerConfig


@dataclass(frozen=True, kw_only=True)
class MLAConfig(ConfigPart):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434). A plain query projection has no bias: `add_qkv_bias` is
    then the bias of the latent of k and v and of the rotated key part."""

    q_lora_rank: int | None = None
    """Size of the latent of the queries; unset means a plain query projection."""
    kv_lora_rank: int = 512
    """Size of the latent of keys and values."""
    qk_head_dim: int = 128
    """Channels of each head of q and k without position encoding."""
    qk_pos_emb_head_dim: int = 64
    """Channels of each head of q and k that the rotary embedding rotates; 0 in models without one."""
    v_head_dim: int = 128
    """Channels of each head of v."""
    latent_norm_epsilon: float = 1e-6
    """Epsilon of the RMSNorm of each latent."""

    def _validate(self) -> None:
        check(self.q_lora_rank is None or self.q_lora_rank > 0, "mla.q_lora_rank", self.q_lora_rank, "positive or null")
        for name in ("kv_lora_rank", "qk_head_dim", "v_head_dim"):
            check(getattr(self, name) > 0, f"mla.{name}", getattr(self, name), "a positive integer")
        rotated = self.qk_pos_emb_head_dim
        check(rotated >= 0, "mla.qk_pos_emb_head_dim", rotated, "zero or a positive integer")


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig(ConfigPart):
    """Queries times `1 + attn_scale * log(1 + floor((position + position_offset) / floor_scale))`, so that attention
    stays sharp over long contexts (arXiv 2501.19399). Llama 4 does so in its "nope" layers, Ministral 3 in all."""

    floor_scale: float
    """Positions after which the factor grows by a step."""
    attn_scale: float
    """Weight of the logarithm in the factor."""
    position_offset: int = 0
    """Added to each position."""
    layers: Literal["nope", "all"] = "all"
    """Layers whose queries are multiplied: those without position encoding, or all."""

    def _validate(self) -> None:
        check(self.floor_scale > 0, "temperature.floor_scale", self.floor_scale, "a positive number")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """Self attention. With `mla`, `kv_channels` and `v_head_dim` follow from it; other values of them are refused."""

    kind: ClassVar[str] = "attention"
    recurrent: ClassVar[bool] = False
    _LATER: ClassVar[frozenset[str]] = frozenset(
        {
            "output_gate_by",
            "output_gate_bias",
            "output_gate_activation",
            "value_scale",
            "key_is_value",
            "rope",
            "indexer",
            "input_multiplier",
            "output_multiplier",
            "value_layernorm",
            "compressed",
        }
    )

    num_attention_heads: int
    """Number of query heads."""
    num_query_groups: int | None = None
    """Number of key and value heads (GQA); unset means as many as query heads."""
    kv_channels: int | None = None
    """Channels of each head; unset means hidden_size / num_attention_heads, or what mla says."""
    v_head_dim: int | None = None
    """Channels of each head of v; unset means kv_channels, or what mla says."""
    add_qkv_bias: bool = False
    """Whether the projections of q, k and v have a bias."""
    add_output_bias: bool = False
    """Whether the output projection has a bias."""
    qk_layernorm: Literal["none", "head", "each_head", "full", "l2"] = "none"
    """Norm of q and k: of each head, with one weight for all (head) or one weight per head (each_head), of all heads
    together (full), or an RMSNorm of each head without weight in layers with a position encoding (l2)."""
    qk_layernorm_after_rope: bool = False
    """Whether the norm of q and k comes after the rotary embedding."""
    qk_layernorm_bias: bool = False
    """Whether a LayerNorm of q and k has a bias."""
    softmax_scale: float | None = None
    """Factor of the scores; unset means 1 / sqrt(head channels)."""
    softmax_scale_by_layer: bool = False
    """Whether the factor of the scores is divided by the number of the layer, from 1."""
    softcap: float | None = None
    """Bound of the tanh soft cap of the scores; unset means none."""
    sinks: bool = False
    """Whether each head has a learned sink that takes part in the softmax."""
    output_gate: bool = False
    """Whether the attention output is multiplied by a gate, an activated projection of the input (arXiv 2505.06708)."""
    output_gate_by: Literal["channel", "head"] = "channel"
    """Whether each channel of the attention output has a gate, or each head."""
    output_gate_bias: bool = False
    """Whether a gate of each channel has a bias, as q, k and v have with add_qkv_bias."""
    output_gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    """Activation of the output gate; softplus is computed in float32."""
    value_scale: float | None = None
    """Factor of v; unset means 1."""
    input_multiplier: float = 1.0
    """Factor of what the projections read, the normed input."""
    output_multiplier: float = 1.0
    """Factor of the result, before it is added to the residual stream."""
    value_layernorm: bool = False
    """Whether each head of v has an RMSNorm without weight."""
    key_is_value: bool = False
    """Whether one projection gives k and v: v is k before its norm and its rotation."""
    rope: RopeConfig | None = None
    """Rotary position embedding of layers with this attention; unset means the model's."""
    clip_qkv: float | None = None
    """Bound to which q, k and v are clamped; unset means none."""
    window_size: int | None = None
    """Positions that a query sees in sliding layers, its own included."""
    chunk_size: int | None = None
    """Positions of each chunk in chunked layers, whose queries see their own chunk only."""
    temperature_tuning: TemperatureConfig | None = None
    """Temperature of the queries by position; unset means none."""
    attention_dropout: float = 0.0
    """Probability with which attention weights are dropped in training."""
    mla: MLAConfig | None = None
    """Multi-latent attention in place of plain projections of q, k and v; unset means none."""
    indexer: IndexerConfig | None = None
    """Sparse attention: an indexer chooses the keys that each query sees; unset means that queries see all."""

    compressed: CompressedConfig | None = None
    """Attention to a window and to compressed keys, by one head that is key and value; unset means none."""

    def _derivations(self) -> dict[str, Any]:
        heads, mla = {"num_query_groups": self.num_attention_heads}, self.mla
        if mla is None:
            return heads
        return heads | {"kv_channels": mla.qk_head_dim + mla.qk_pos_emb_head_dim, "v_head_dim": mla.v_head_dim}

    def _validate(self) -> None:
        heads = self.num_attention_heads
        check(heads > 0, "attention.num_attention_heads", heads, "a positive integer")
        self._fill()
        groups = self.num_query_groups
        assert groups is not None, "filled in"
        divides = 0 < groups <= heads and heads % groups == 0
        check(divides, "attention.num_query_groups", groups, f"a divisor of num_attention_heads = {heads}")
        for name in ("kv_channels", "v_head_dim", "window_size", "chunk_size"):
            value = getattr(self, name)
            check(value is None or value > 0, f"attention.{name}", value, "a positive integer or null")
        plain = (self.input_multiplier, self.output_multiplier) == (1.0, 1.0) or (self.mla or self.indexer) is None
        check(
            plain, "attention.input_multiplier", self.input_multiplier, "1, as output_multiplier, with mla or indexer"
        )
        for name in ("softmax_scale", "softcap", "clip_qkv", "value_scale"):
            value = getattr(self, name)
            check(value is None or value > 0, f"attention.{name}", value, "a positive number or null")
        allowed_here = self.qk_layernorm_bias and self.qk_layernorm not in ("head", "full")
        check(not allowed_here, "attention.qk_layernorm_bias", True, "false unless qk_layernorm is 'head' or 'full'")
        if self.mla is not None:
            for name, value in self._derivations().items():
                if name != "num_query_groups":
                    allowed = f"null or {value}, because attention.mla says so"
                    check(getattr(self, name) == value, f"attention.{name}", getattr(self, name), allowed)
            allowed_here = self.qk_layernorm == "none" and groups == heads and not self.sinks and self.clip_qkv is None
            check(allowed_here, "attention.mla", self.mla, "null with grouped queries, qk_layernorm, sinks or clip_qkv")
        check(
            self.output_gate or (self.output_gate_by, self.output_gate_activation) == ("channel", "sigmoid"),
            "attention.output_gate",
            False,
            "true where output_gate_by or output_gate_activation is set",
        )
        biased = self.add_qkv_bias and self.output_gate and self.output_gate_by == "channel"
        check(biased or not self.output_gate_bias, "attention.output_gate_bias", True, "false without add_qkv_bias")
        by_head = self.mla is None or not self.output_gate or self.output_gate_by == "head"
        check(by_head, "attention.output_gate_by", self.output_gate_by, "'head' with mla")
        same = self.v_head_dim in (None, self.kv_channels) and self.mla is None
        check(not self.key_is_value or same, "attention.key_is_value", True, "false with mla, or v_head_dim of its own")
        check(self.mla is None or not self.value_layernorm, "attention.value_layernorm", True, "false with mla")
        check(0 <= self.attention_dropout < 1, "attention.attention_dropout", self.attention_dropout, "0 <= p < 1")
        sizes = (self.window_size, self.chunk_size, self.softcap)
        alone = sizes == (None, None, None) and not (self.sinks or self.attention_dropout or self.output_gate)
        allowed = "null with window_size, chunk_size, softcap, sinks, attention_dropout or output_gate"
        check(self.indexer is None or alone, "attention.indexer", self.indexer, allowed)

        self._check_compressed()

    def _check_compressed(self) -> None:
        """Check that nothing is asked for that attention to compressed keys does not have."""
        its = self.compressed
        if its is None:
            return
        one = self.num_query_groups == 1 and self.key_is_value and self.window_size is not None
        check(one, "attention.compressed", its, "null without key_is_value, one query group and window_size")
        asked = (self.mla, self.indexer, self.softcap, self.value_scale, self.clip_qkv, self.temperature_tuning)
        flags = (self.output_gate, self.value_layernorm, self.add_qkv_bias, self.add_output_bias)
        plain = not any(asked) and not any(flags) and self.qk_layernorm == "none" and self.chunk_size is None
        check(plain, "attention.compressed", its, "null with other elements of attention than sinks and dropout")
        fits = self.num_attention_heads % its.o_groups == 0
        check(fits, "compressed.o_groups", its.o_groups, f"a divisor of {self.num_attention_heads} heads")

    @property
    def key_channels(self) -> int:
        """Channels of each head of q and k."""
        assert self.kv_channels is not None, "filled in by validation"
        return self.kv_channels

    @property
    def value_channels(self) -> int:
        """Channels of each head of v."""
        return self.v_head_dim or self.key_channels

    @property
    def rotated_channels(self) -> int:
        """Channels of a head that `rope.rotary_percent` counts: all of them, with `mla` the rotated part."""
        return self.key_channels if self.mla is None else self.mla.qk_pos_emb_head_dim

    @property
    def gate_rows(self) -> int:
        """Rows of the projection of q, k and v that give an output gate of each channel."""
        by_channel = self.output_gate and self.output_gate_by == "channel"
        return self.num_attention_heads * self.value_channels if by_channel else 0

    @property
    def key_value_sizes(self) -> tuple[int, int, int]:
        """Key and value heads, and channels of each head of k and of v."""
        return self.num_query_groups or self.num_attention_heads, self.key_channels, self.value_channels

    def qkv_blocks(self, *, own_keys: bool = True) -> dict[str, int]:
        """Rows of what `linear_qkv` joins, by name: q, k, v where it is not k, and the gate where each channel has one;
        without own_keys k and v are another layer's."""
        groups, keys, values = self.key_value_sizes
        both = {"k": groups * keys, "v": 0 if self.key_is_value else groups * values} if own_keys else {}
        found = {"q": self.num_attention_heads * keys, **both, "gate": self.gate_rows}
        return {name: rows for name, rows in found.items() if rows}

    def qkv_rows(self, *, own_keys: bool = True) -> tuple[int, ...]:
        """Rows of `qkv_blocks`."""
        return tuple(self.qkv_blocks(own_keys=own_keys).values())

    @property
    def has_bias_apart(self) -> bool:
        """Whether q, k and v have a bias and the gate beside them has none."""
        return self.add_qkv_bias and self.gate_rows > 0 and not self.output_gate_bias

    @property
    def has_head_gate(self) -> bool:
        """Whether each head has an output gate, by a projection apart from that of q, k and v."""
        return self.output_gate and self.output_gate_by == "head"

    def states(self) -> tuple[State, ...]:
        """As `MixerConfig.states`: none, keys and values grow."""
        return ()

    def flops(self, length: float) -> float:
        """As `MixerConfig.flops`: of scores, and of the sum of values, for a query that sees `length` keys."""
        index = 0.0
        if self.indexer is not None and length > self.indexer.topk:
            index = 0.0 if self.indexer.shared else 2.0 * self.indexer.n_heads * self.indexer.head_dim * length
            length = self.indexer.choices
        return index + 2.0 * self.num_attention_heads * (self.key_channels + self.value_channels) * length

    @property
    def index_channels(self) -> int:
        """Channels that a token has for the indexer, 0 for attention without an indexer."""
        return 0 if self.indexer is None or self.indexer.shared else self.indexer.key_channels

    def cached_sizes(self, tp_size: int = 1) -> tuple[int, tuple[int, int]]:
        """Return the heads of what decoding keeps of a token, on a rank of `tp_size`, and the channels of the two
        tensors that it is kept in."""
        if self.mla is not None:
            return 1, (self.mla.kv_lora_rank, self.mla.qk_pos_emb_head_dim + self.index_channels)
        if self.compressed is not None:
            return 1, (self.key_channels, self.compressed.cached_channels(self.key_channels))
        groups = max(1, (self.num_query_groups or self.num_attention_heads) // tp_size)
        return groups, (self.key_channels, self.value_channels + -(-self.index_channels // groups))

    def shared_sizes(self) -> dict[str, int]:
        """As `MixerConfig.shared_sizes`."""
        groups = self.num_query_groups or self.num_attention_heads
        return {"num_attention_heads": self.num_attention_heads, "num_query_groups": groups}
