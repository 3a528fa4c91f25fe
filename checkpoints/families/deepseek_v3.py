"""deepseek_v3: latent attention, sigmoid router with a bias for the choice (arXiv 2412.19437). kimi_k2 is the same
architecture under another name; Moonlight is published as deepseek_v3."""

from dataclasses import replace

from .base.common import ATTENTION_BIAS
from .base.family import Family
from .base.fields import Only, switch
from .base.latent import latent_fields
from .base.moe_fields import ROUTED_EXPERTS, ExpertGroups, FirstDense, SharedExpertCount, expert_sizes, sigmoid_router
from .base.names import Fused
from .base.rope import Rope
from .base.unused import LAYERS_BEHIND
from .deepseek_v2 import latent_decoder
from .glm4_moe import MTP_NAMES

ROPE_INTERLEAVE = switch("rope_interleave", "rope.style", "interleaved", "half", True)
"""Neighbouring channels are rotated, or those half a head apart."""

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    fields=(
        *latent_decoder(max_positions=4096),
        *latent_fields(query_rank=1536, rope=Rope()),
        ATTENTION_BIAS,
        ROPE_INTERLEAVE,
        *expert_sizes(ROUTED_EXPERTS, 256, 8, width=2048),
        SharedExpertCount("n_shared_experts", 1, default_size=2048),
        FirstDense(3),
        Only("scoring_func", "sigmoid"),
        Only("topk_method", "noaux_tc"),
        *sigmoid_router(default_scale=2.5),
        ExpertGroups(8, 4),
    ),
    names=MTP_NAMES,
    other_names=(replace(MTP_NAMES, form="fused", experts=Fused()),),
    unused=LAYERS_BEHIND,
)
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
