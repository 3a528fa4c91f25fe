"""llama: RMSNorm, grouped-query attention, gated MLP, optional biases (arXiv 2302.13971, 2407.21783)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from .common import decoder_fields, dense_decoder
from .family import Family
from .fields import Field, Values, read_typed
from .rope import Rope


@dataclass(frozen=True)
class AttentionBias:
    """`attention_bias`: one flag for the q, k, v and output projections."""

    names: tuple[str, ...] = ("attention_bias",)

    def read(self, hf: Mapping[str, Any]) -> Values:
        bias = read_typed(hf, "attention_bias", bool, False)
        return {"attention.add_qkv_bias": bias, "attention.add_output_bias": bias}

    def write(self, config: ModelConfig) -> Values:
        return {"attention_bias": config.attention.add_qkv_bias}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(*decoder_fields(max_positions=2048), Field("mlp_bias", "mlp.bias", bool, False), AttentionBias(), Rope()),
    weights=dense_decoder,
)
