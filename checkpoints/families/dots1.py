"""dots1: qwen3's attention, DeepSeek-V3's router, shared experts (arXiv 2506.05767)."""

from dataclasses import replace

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import REQUIRED, Fixed
from .base.layer_fields import WindowedFrom
from .base.moe_fields import ROUTED_EXPERTS, ExpertGroups, FirstDense, SharedExpertCount, expert_sizes, sigmoid_router
from .base.names import Fused
from .base.rope import Rope
from .glm4_moe import SIGMOID_NAMES

DOTS1 = Family(
    model_type="dots1",
    fields=(
        *decoder_fields(max_positions=2048, kv_heads=32),
        ATTENTION_BIAS,
        Fixed("attention.qk_layernorm", "head"),
        *expert_sizes(ROUTED_EXPERTS, REQUIRED, REQUIRED, width=1408),
        SharedExpertCount("n_shared_experts", None, default_size=1408),
        FirstDense(0),
        *sigmoid_router(normalize=False),
        ExpertGroups(),
        WindowedFrom(window=4096, first=62),
        Rope(),
    ),
    names=SIGMOID_NAMES,
    other_names=(replace(SIGMOID_NAMES, form="fused", experts=Fused()),),
)
