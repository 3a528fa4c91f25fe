"""qwen3_moe: qwen3's attention, experts in chosen layers, top-k weights divided by their sum on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from ..errors import CheckpointError
from .common import RouterLoss, Weights, attention, decoder_fields, experts, gated_mlp, stem
from .family import Family
from .fields import REQUIRED, AllLayersWindow, Field, Fixed, Values, read_typed
from .llama import AttentionBias
from .rope import Rope


@dataclass(frozen=True)
class ExpertCount:
    """`num_experts`, which transformers 5.17 writes as `num_local_experts`; both may be present and must agree."""

    names: tuple[str, ...] = ("num_experts", "num_local_experts")

    def read(self, hf: Mapping[str, Any]) -> Values:
        counts = {read_typed(hf, name, int, REQUIRED) for name in self.names if name in hf} or {128}
        if len(counts) > 1:
            raise CheckpointError(
                f"config.json has num_experts = {hf['num_experts']} and num_local_experts = {hf['num_local_experts']}"
            )
        return {"moe.num_moe_experts": counts.pop()}

    def write(self, config: ModelConfig) -> Values:
        return {"num_experts": config.moe.num_moe_experts if config.moe is not None else 0}


@dataclass(frozen=True)
class SparseLayers:
    """A layer has experts if its number from 1 is a multiple of `decoder_sparse_step` and not in `mlp_only_layers`."""

    names: tuple[str, ...] = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, hf: Mapping[str, Any]) -> Values:
        step = read_typed(hf, "decoder_sparse_step", int, 1)
        dense = read_typed(hf, "mlp_only_layers", list, None) or []
        layers = read_typed(hf, "num_hidden_layers", int, REQUIRED)
        if step < 1:
            raise CheckpointError(f"config.json has decoder_sparse_step = {step}")
        return {"moe.layers": [i for i in range(layers) if (i + 1) % step == 0 and i not in dense]}

    def write(self, config: ModelConfig) -> Values:
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(config.num_layers) if not config.is_moe_layer(i)],
        }


def weights(config: ModelConfig) -> Weights:
    yield from stem(config)
    for i in range(config.num_layers):
        yield from attention(config, i)
        if config.is_moe_layer(i):
            yield from experts(config, i, "mlp", gate="gate_proj", up="up_proj", down="down_proj")
        else:
            yield from gated_mlp(config, i)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *decoder_fields(max_positions=32768, kv_heads=4),
        Fixed("attention.qk_layernorm", "head"),
        AttentionBias(),
        ExpertCount(),
        Field("num_experts_per_tok", "moe.moe_router_topk", int, 8),
        Field("moe_intermediate_size", "moe.moe_ffn_hidden_size", int, 768),
        Field("norm_topk_prob", "moe.router.normalize", bool, False),
        SparseLayers(),
        RouterLoss(),
        AllLayersWindow(default=4096, enabled_by="use_sliding_window"),
        Rope(),
    ),
    weights=weights,
)
