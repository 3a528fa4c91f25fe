"""glm4_moe: grouped-query attention with partial rotation, DeepSeek-V3's router, shared experts (arXiv 2508.06471)."""

from dataclasses import replace

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, switch
from .base.moe_fields import ROUTED_EXPERTS, ExpertGroups, FirstDense, SharedExpertCount, expert_sizes, sigmoid_router
from .base.names import Fused, MTPNames, Names
from .base.rope import Rope
from .base.unused import LAYERS_BEHIND

SIGMOID_NAMES = Names(selection_bias="mlp.gate.e_score_correction_bias")
MTP_NAMES = replace(SIGMOID_NAMES, mtp=MTPNames())

GLM4_MOE = Family(
    model_type="glm4_moe",
    fields=(
        *decoder_fields(max_positions=131072, norm_eps=1e-5, kv_heads=8),
        Field("attention_bias", "attention.add_qkv_bias", bool, False),
        switch("use_qk_norm", "attention.qk_layernorm", "head", "none"),
        *expert_sizes(ROUTED_EXPERTS, 128, 8, width=1408),
        SharedExpertCount("n_shared_experts", 1, default_size=1408),
        FirstDense(1),
        *sigmoid_router(),
        ExpertGroups(),
        Rope(partial=0.5),
    ),
    names=MTP_NAMES,
    other_names=(replace(MTP_NAMES, form="fused", experts=Fused()),),
    unused=LAYERS_BEHIND,
)
