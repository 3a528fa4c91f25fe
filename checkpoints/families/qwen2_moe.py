"""qwen2_moe: qwen2's attention, experts in chosen layers beside a shared one behind a gate (arXiv 2407.10671)."""

from dataclasses import replace

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed, OneOf
from .base.layer_fields import PerLayerWindow
from .base.moe_fields import RouterLoss, SparseLayers
from .base.names import Fused, Names
from .base.rope import Rope

_FORM = Names(
    shared_fc1=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_fc2="mlp.shared_expert.down_proj",
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=(
        *decoder_fields(max_positions=32768, kv_heads=16),
        Field("qkv_bias", "attention.add_qkv_bias", bool, True),
        OneOf(("num_experts", "num_local_experts"), "moe.num_moe_experts", int, 60),
        Field("num_experts_per_tok", "moe.moe_router_topk", int, 4),
        Field("moe_intermediate_size", "moe.moe_ffn_hidden_size", int, 1408),
        Field("shared_expert_intermediate_size", "moe.shared_expert_intermediate_size", int, 5632),
        Fixed("moe.shared_expert_gate", True),
        Field("norm_topk_prob", "moe.router.normalize", bool, False),
        SparseLayers(),
        RouterLoss(),
        PerLayerWindow(alternating=True),
        Rope(),
    ),
    names=_FORM,
    other_names=(replace(_FORM, form="fused", experts=Fused()),),
)
