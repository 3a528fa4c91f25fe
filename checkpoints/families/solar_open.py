"""solar_open: DeepSeek-V3's router with shared experts in every layer, beside grouped-query attention
(arXiv 2601.07022)."""

from dataclasses import replace

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field
from .base.moe_fields import ROUTED_EXPERTS, ExpertGroups, ExpertWidth, SharedExpertCount, expert_sizes, sigmoid_router
from .base.names import Fused
from .base.rope import Rope
from .glm4_moe import SIGMOID_NAMES

SOLAR_OPEN = Family(
    model_type="solar_open",
    fields=(
        *decoder_fields(max_positions=131072, norm_eps=1e-5, kv_heads=8, head_dim=128, without=("intermediate_size",)),
        Field("attention_bias", "attention.add_qkv_bias", bool, False),
        *expert_sizes(ROUTED_EXPERTS, 128, 8, width=1280),
        ExpertWidth(1280),
        SharedExpertCount("n_shared_experts", 1, default_size=1280),
        *sigmoid_router(),
        ExpertGroups(),
        Rope(theta=1e6),
    ),
    names=SIGMOID_NAMES,
    other_names=(replace(SIGMOID_NAMES, form="fused", experts=Fused()),),
)
