"""mixtral: experts in every layer, top-k of a softmax, weights divided by their sum (arXiv 2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from .common import RouterLoss, Weights, attention, decoder_fields, experts, stem
from .family import Family
from .fields import REQUIRED, AllLayersWindow, Field, Values, read_typed
from .rope import Rope


@dataclass(frozen=True)
class ExpertSize:
    """`intermediate_size` is the experts' width; there is no dense MLP."""

    names: tuple[str, ...] = ("intermediate_size",)

    def read(self, hf: Mapping[str, Any]) -> Values:
        return {"moe.moe_ffn_hidden_size": read_typed(hf, "intermediate_size", int, REQUIRED)}

    def write(self, config: ModelConfig) -> Values:
        return {}


def weights(config: ModelConfig) -> Weights:
    yield from stem(config)
    for i in range(config.num_layers):
        yield from attention(config, i)
        yield from experts(config, i, "block_sparse_moe", gate="w1", up="w3", down="w2")


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *decoder_fields(max_positions=131072, norm_eps=1e-5, kv_heads=8),
        ExpertSize(),
        Field("num_local_experts", "moe.num_moe_experts", int, 8),
        Field("num_experts_per_tok", "moe.moe_router_topk", int, 2),
        RouterLoss(),
        AllLayersWindow(default=None),
        Rope(theta=1e6),
    ),
    weights=weights,
)
