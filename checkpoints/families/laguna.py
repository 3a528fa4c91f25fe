"""laguna: attention with a softplus output gate by head or by channel, as many query heads in each layer as the file
says, rotation by layer type, a sigmoid router whose logits are capped (poolside Laguna)."""

from dataclasses import replace

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.attentions import HeadsPerLayer
from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed, HFConfig, Only, OwnEntry, Values, fixed, get_path, read_typed, shorten_value
from .base.layer_fields import LayerPattern
from .base.moe_fields import NUM_EXPERTS, LayerKinds, RouterLoss, expert_sizes
from .base.names import Fused, Names
from .base.rope import RopePerLayerType


class Gating(OwnEntry):
    """`gating`: true or "per-head", or "per-element"."""

    names = ("gating",)

    def read(self, hf: HFConfig) -> Values:
        gating = hf.get("gating", True)
        if gating is not True and gating not in ("per-head", "per-element"):
            raise CheckpointError(
                f"config.json has gating = {shorten_value(gating)}; supported: True, 'per-head', 'per-element'"
            )
        return {"attention.output_gate_by": "channel" if gating == "per-element" else "head"}

    def write(self, config: ModelConfig) -> Values:
        return {"gating": "per-element" if config.attention.output_gate_by == "channel" else True}


class RouterSoftcap(OwnEntry):
    """`moe_router_logit_softcapping`: 0 means none."""

    names = ("moe_router_logit_softcapping",)

    def read(self, hf: HFConfig) -> Values:
        cap = read_typed(hf, "moe_router_logit_softcapping", float, 0.0)
        return {"moe.router.logits_softcap": cap} if cap > 0 else {}

    def write(self, config: ModelConfig) -> Values:
        return {"moe_router_logit_softcapping": get_path(config, "moe.router.logits_softcap") or 0.0}


_FORM = Names(
    gate="self_attn.g_proj",
    selection_bias="mlp.experts.e_score_correction_bias",
    shared_fc1=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_fc2="mlp.shared_expert.down_proj",
)
_IN_MEMORY = replace(
    _FORM,
    form="fused",
    experts=Fused(),
    selection_bias="mlp.gate.e_score_correction_bias",
    shared_fc1=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_fc2="mlp.shared_experts.down_proj",
)

LAGUNA = Family(
    model_type="laguna",
    fields=(
        *decoder_fields(max_positions=131072, kv_heads=8, head_dim=128),
        ATTENTION_BIAS,
        *fixed({"attention.qk_layernorm": "head", "attention.output_gate": True}),
        Fixed("attention.output_gate_activation", "softplus"),
        Gating(),
        *expert_sizes(NUM_EXPERTS, 256, 8, width=512, shared=512),
        LayerKinds(),
        *fixed({"moe.router.score": "sigmoid", "moe.router.expert_bias": True}),
        Field("moe_routed_scaling_factor", "moe.router.scaling_factor", float, 1.0),
        Only("moe_apply_router_weight_on_input", False),
        RouterSoftcap(),
        RouterLoss(),
        LayerPattern(window=512, period=1),
        RopePerLayerType(500000.0, 10000.0, partial=1.0, default=(0.5, 1.0)),
    ),
    mixers=HeadsPerLayer(),
    names=_FORM,
    other_names=(_IN_MEMORY,),
)
