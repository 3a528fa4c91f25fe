"""Entries and weight maps that most decoder families share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from ..errors import CheckpointError
from ..naming import head_sizes
from ..ops import At, Concat, Layout, Stack
from .fields import REQUIRED, Choice, Entry, Field, Values, read_typed

Weights = Iterator[tuple[str, Layout]]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}


def decoder_fields(
    *, max_positions: int, norm_eps: float = 1e-6, kv_heads: int | None = None, head_dim: int | None = None
) -> tuple[Entry, ...]:
    """Return the fields of an RMSNorm decoder with grouped-query attention; the arguments are the class's defaults."""
    return (
        Field("vocab_size", "vocab_size", int),
        Field("hidden_size", "hidden_size", int),
        Field("num_hidden_layers", "num_layers", int),
        Field("num_attention_heads", "attention.num_attention_heads", int),
        Field("max_position_embeddings", "max_position_embeddings", int, max_positions),
        Field("rms_norm_eps", "norm.layernorm_epsilon", float, norm_eps),
        Field("intermediate_size", "mlp.ffn_hidden_size", int),
        Field("tie_word_embeddings", "embedding.share_embeddings_and_output_weights", bool, False),
        Field("attention_dropout", "attention.attention_dropout", float, 0.0),
        Field("initializer_range", "init_method_std", float, 0.02),
        Choice("hidden_act", "mlp.activation", ACTIVATIONS, "silu"),
        KeyValueHeads(kv_heads),
        HeadDim(head_dim),
    )


@dataclass(frozen=True)
class KeyValueHeads:
    """`num_key_value_heads`: null means as many as query heads; absent means `default`."""

    default: int | None
    names: tuple[str, ...] = ("num_key_value_heads",)

    def read(self, hf: Mapping[str, Any]) -> Values:
        if "num_key_value_heads" not in hf and self.default is not None:
            return {"attention.num_query_groups": self.default}
        heads = read_typed(hf, "num_key_value_heads", int, None)
        return {} if heads is None else {"attention.num_query_groups": heads}

    def write(self, config: ModelConfig) -> Values:
        return {"num_key_value_heads": config.attention.num_query_groups}


@dataclass(frozen=True)
class HeadDim:
    """`head_dim`: null means hidden_size / heads, rounded down as transformers does; absent means `default`."""

    default: int | None
    names: tuple[str, ...] = ("head_dim",)

    def read(self, hf: Mapping[str, Any]) -> Values:
        if "head_dim" not in hf and self.default is not None:
            return {"attention.kv_channels": self.default}
        size = read_typed(hf, "head_dim", int, None)
        if size is None:
            heads = read_typed(hf, "num_attention_heads", int, REQUIRED)
            if heads <= 0:
                raise CheckpointError(f"config.json has num_attention_heads = {heads}")
            size = read_typed(hf, "hidden_size", int, REQUIRED) // heads
        return {"attention.kv_channels": size}

    def write(self, config: ModelConfig) -> Values:
        return {"head_dim": config.attention.kv_channels}


@dataclass(frozen=True)
class RouterLoss:
    """`router_aux_loss_coef` counts only with `output_router_logits`, as in transformers' loss."""

    names: tuple[str, ...] = ("router_aux_loss_coef", "output_router_logits")

    def read(self, hf: Mapping[str, Any]) -> Values:
        used = read_typed(hf, "output_router_logits", bool, False)
        coefficient = read_typed(hf, "router_aux_loss_coef", float, 0.001)
        return {"moe.aux_loss_coeff": coefficient if used else 0.0}

    def write(self, config: ModelConfig) -> Values:
        coefficient = config.moe.aux_loss_coeff if config.moe is not None else 0.0
        return (
            {"output_router_logits": True, "router_aux_loss_coef": coefficient}
            if coefficient
            else {"output_router_logits": False}
        )


def stem(config: ModelConfig) -> Weights:
    """Embedding, final norm, output layer."""
    yield "embedding.word_embeddings.weight", At("model.embed_tokens.weight")
    yield "decoder.final_layernorm.weight", At("model.norm.weight")
    if not config.embedding.share_embeddings_and_output_weights:
        yield "output_layer.weight", At("lm_head.weight")


def attention(config: ModelConfig, i: int) -> Weights:
    """Pre-norm attention with separate q, k, v projections; biases and per-head norms as the configuration says."""
    a, ours, theirs = config.attention, f"decoder.layers.{i}.self_attention", f"model.layers.{i}.self_attn"
    heads, groups, size = head_sizes(config)
    yield f"{ours}.linear_qkv.layer_norm_weight", At(f"model.layers.{i}.input_layernorm.weight")
    for kind in ("weight", "bias") if a.add_qkv_bias else ("weight",):
        parts = (
            (At(f"{theirs}.{p}_proj.{kind}"), rows)
            for p, rows in (("q", heads * size), ("k", groups * size), ("v", groups * size))
        )
        yield f"{ours}.linear_qkv.{kind}", Concat(*parts)
    yield f"{ours}.linear_proj.weight", At(f"{theirs}.o_proj.weight")
    if a.add_output_bias:
        yield f"{ours}.linear_proj.bias", At(f"{theirs}.o_proj.bias")
    if a.qk_layernorm == "head":
        yield f"{ours}.q_layernorm.weight", At(f"{theirs}.q_norm.weight")
        yield f"{ours}.k_layernorm.weight", At(f"{theirs}.k_norm.weight")


def gated_mlp(config: ModelConfig, i: int) -> Weights:
    """A dense MLP with gate, up and down projections, and its norm."""
    ours, theirs, rows = f"decoder.layers.{i}.mlp", f"model.layers.{i}.mlp", config.mlp.ffn_hidden_size
    yield f"{ours}.linear_fc1.layer_norm_weight", At(f"model.layers.{i}.post_attention_layernorm.weight")
    for kind in ("weight", "bias") if config.mlp.bias else ("weight",):
        yield (
            f"{ours}.linear_fc1.{kind}",
            Concat((At(f"{theirs}.gate_proj.{kind}"), rows), (At(f"{theirs}.up_proj.{kind}"), rows)),
        )
        yield f"{ours}.linear_fc2.{kind}", At(f"{theirs}.down_proj.{kind}")


def experts(config: ModelConfig, i: int, block: str, gate: str, up: str, down: str) -> Weights:
    """A router and one set of tensors per expert, under `model.layers.{i}.{block}`, with the given projection names."""
    moe = config.moe
    assert moe is not None, "called for MoE layers only"
    ours, theirs, rows = f"decoder.layers.{i}.mlp", f"model.layers.{i}.{block}", moe.moe_ffn_hidden_size
    yield f"decoder.layers.{i}.pre_mlp_layernorm.weight", At(f"model.layers.{i}.post_attention_layernorm.weight")
    yield f"{ours}.router.weight", At(f"{theirs}.gate.weight")
    names = [f"{theirs}.experts.{e}" for e in range(moe.num_moe_experts)]
    pairs = (Concat((At(f"{n}.{gate}.weight"), rows), (At(f"{n}.{up}.weight"), rows)) for n in names)
    yield f"{ours}.experts.linear_fc1.weight", Stack(*pairs)
    yield f"{ours}.experts.linear_fc2.weight", Stack(*(At(f"{n}.{down}.weight") for n in names))


def dense_decoder(config: ModelConfig) -> Weights:
    """The weight map of a dense decoder with the names that llama introduced."""
    yield from stem(config)
    for i in range(config.num_layers):
        yield from attention(config, i)
        yield from gated_mlp(config, i)
