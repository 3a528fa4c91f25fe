"""Self attention: grouped queries, windows, normalised queries and keys, latent attention, temperatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .part import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class MLAConfig(ConfigPart):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434). `q_lora_rank` None means a plain query projection, which
    has no bias: `add_qkv_bias` is then that of the latent of k and v and of the rotated key part."""

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
    "chunked" ones. `softmax_scale` None means 1/sqrt(head dim); `softmax_scale_by_layer` divides it by the layer's
    number, from 1. `softcap` is tanh soft-capping of the scores. `qk_layernorm`: the model's kind of norm for each
    "head" of q and k, for all of them together ("full"), or an RMSNorm of each head without weight ("l2", only in
    layers with a position encoding); `qk_layernorm_bias` gives a LayerNorm its bias; `clip_qkv` clamps q, k and v
    behind it. Derived where None: `num_query_groups` from `num_attention_heads`, `kv_channels` from the model's
    hidden_size; with `mla`, `kv_channels` and `v_head_dim` from that, which other values are refused with.
    """

    num_attention_heads: int
    num_query_groups: int | None = None
    kv_channels: int | None = None
    v_head_dim: int | None = None
    add_qkv_bias: bool = False
    add_output_bias: bool = False
    qk_layernorm: Literal["none", "head", "full", "l2"] = "none"
    qk_layernorm_after_rope: bool = False
    qk_layernorm_bias: bool = False
    softmax_scale: float | None = None
    softmax_scale_by_layer: bool = False
    softcap: float | None = None
    sinks: bool = False
    output_gate: bool = False
    clip_qkv: float | None = None
    window_size: int | None = None
    chunk_size: int | None = None
    temperature_tuning: TemperatureConfig | None = None
    attention_dropout: float = 0.0
    mla: MLAConfig | None = None

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
        for name in ("softmax_scale", "softcap", "clip_qkv"):
            value = getattr(self, name)
            check(value is None or value > 0, f"attention.{name}", value, "a positive number or null")
        plain = self.qk_layernorm_bias and self.qk_layernorm not in ("head", "full")
        check(not plain, "attention.qk_layernorm_bias", True, "false unless qk_layernorm is 'head' or 'full'")
        if self.mla is not None:
            for name, value in self._derivations().items():
                if name != "num_query_groups":
                    allowed = f"null or {value}, because attention.mla says so"
                    check(getattr(self, name) == value, f"attention.{name}", getattr(self, name), allowed)
            plain = self.qk_layernorm == "none" and groups == heads and not self.sinks and self.clip_qkv is None
            check(plain, "attention.mla", self.mla, "null with grouped queries, qk_layernorm, sinks or clip_qkv")
        check(0 <= self.attention_dropout < 1, "attention.attention_dropout", self.attention_dropout, "0 <= p < 1")
