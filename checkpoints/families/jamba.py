"""jamba: Mamba in most layers, attention without positions in some, experts in every other one (arXiv 2403.19887)."""

from dataclasses import dataclass, replace
from typing import Any

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Fixed, HFConfig, Only, OwnEntry, Values, read_typed
from .base.moe_fields import RouterLoss
from .base.names import Fused, Names, PerExpert
from .base.recurrent import MambaNames, MixerField, Nested, RecurrentLayers, TimeStepRank


def _layers(hf: HFConfig, kind: str, layers: int, period: int, offset: int) -> list[int]:
    """Return the layers whose number is `KIND_layer_offset` modulo `KIND_layer_period`."""
    period = read_typed(hf, f"{kind}_layer_period", int, period)
    offset = read_typed(hf, f"{kind}_layer_offset", int, offset)
    if not 0 <= offset < period:
        raise CheckpointError(
            f"config.json has {kind}_layer_offset = {offset}; allowed: 0 or more, below {kind}_layer_period = {period}"
        )
    return list(range(offset, layers, period))


def _period(kind: str, found: list[int], layers: int) -> Values:
    """Return the period and the offset that give these layers, or the first of them alone."""
    first = found[0] if found else layers
    period = found[1] - first if len(found) > 1 else max(layers, first + 1)
    return {f"{kind}_layer_period": max(period, first + 1), f"{kind}_layer_offset": first}


class PeriodicExperts(OwnEntry):
    """`num_experts` in the layers that `expert_layer_period` and `expert_layer_offset` say, as wide as the MLP of the
    others; 1: MLPs alone. `num_local_experts` is another name of it."""

    names = (
        *("intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok"),
        *("expert_layer_period", "expert_layer_offset"),
        *RouterLoss().names,
    )

    def read(self, hf: HFConfig) -> Values:
        size = read_typed(hf, "intermediate_size", int, 14336)
        name = "num_local_experts" if "num_local_experts" in hf else "num_experts"
        experts, layers = read_typed(hf, name, int, 16), read_typed(hf, "num_hidden_layers", int, 32)
        sparse = _layers(hf, "expert", layers, 2, 1)
        if experts <= 1 or not sparse:
            return {"mlp.ffn_hidden_size": size}
        return {
            "mlp.ffn_hidden_size": size,
            "moe.moe_ffn_hidden_size": size,
            "moe.num_moe_experts": experts,
            "moe.moe_router_topk": read_typed(hf, "num_experts_per_tok", int, 2),
            "moe.layers": sparse,
            "moe.router.normalize": False,
            **RouterLoss().read(hf),
        }

    def write(self, config: ModelConfig) -> Values:
        moe = config.moe
        values: Values = {"intermediate_size": config.mlp.ffn_hidden_size, "num_experts": 1}
        if moe is None:
            return values
        return values | {
            "num_experts": moe.num_moe_experts,
            "num_experts_per_tok": moe.moe_router_topk,
            **_period("expert", list(moe.layers or ()), config.num_layers),
            **RouterLoss().write(config),
        }


def _pattern(hf: HFConfig, layers: int) -> list[str]:
    attention = _layers(hf, "attn", layers, 8, 4)
    return ["full_attention" if i in attention else "linear_attention" for i in range(layers)]


class AttentionPeriod(RecurrentLayers):
    """`attn_layer_period` and `attn_layer_offset` in place of `layer_types`, of which the class takes no notice."""

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        return super().read({name: value for name, value in hf.items() if name != "layer_types"}, nested)

    def write(self, config: ModelConfig) -> Values:
        values = super().write(config)
        attends = [i for i, kind in enumerate(values.pop("layer_types")) if kind == self.attention[0]]
        return values | _period("attn", attends, config.num_layers)


@dataclass(frozen=True)
class ExpandedChannels(MixerField):
    """`mamba_expand`: the channels by hidden_size."""

    hf: str = "mamba_expand"
    name: str = "channels"
    kind: type = int

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        return {"channels": read_typed(hf, "mamba_expand", int, 2) * nested["hidden_size"]}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        return {"mamba_expand": mixer.channels // config.hidden_size}


_NAMES = Names(
    final_norm="model.final_layernorm",
    norms=("input_layernorm", None, "pre_ff_layernorm", None),
    fc1=("feed_forward.gate_proj", "feed_forward.up_proj"),
    fc2="feed_forward.down_proj",
    router="feed_forward.router",
    experts=PerExpert(*(f"feed_forward.experts.{{e}}.{name}_proj" for name in ("gate", "up", "down"))),
    mixers={"mamba": MambaNames(norms=("dt_layernorm", "b_layernorm", "c_layernorm"))},
)

JAMBA = Family(
    model_type="jamba",
    fields=(
        *decoder_fields(max_positions=262144, kv_heads=8, pad=0, without=("hidden_act", "intermediate_size")),
        Only("hidden_act", "silu"),
        Fixed("embedding.position_embedding_type", "none"),
        PeriodicExperts(),
    ),
    mixers=AttentionPeriod(
        kind="mamba",
        parts=(
            ExpandedChannels(),
            MixerField("mamba_d_state", "state_size", int, 16),
            TimeStepRank("mamba_dt_rank"),
            MixerField("mamba_d_conv", "conv_kernel_size", int, 4),
            MixerField("mamba_proj_bias", "use_bias", bool, False),
            MixerField("mamba_conv_bias", "use_conv_bias", bool, True),
        ),
        pattern=_pattern,
        fixed={"selection_norm": "with_weight"},
        extra=("attn_layer_period", "attn_layer_offset"),
    ),
    names=_NAMES,
    other_names=(
        replace(
            _NAMES,
            form="fused",
            loadable=False,
            experts=Fused("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        ),
    ),
)
