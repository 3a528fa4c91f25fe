"""glm4_moe_lite: deepseek_v3's layer with layers with experts named one by one (arXiv 2508.06471)."""

from dataclasses import replace

from .base.common import ATTENTION_BIAS
from .base.family import Family
from .base.latent import latent_fields
from .base.moe_fields import ROUTED_EXPERTS, ExpertGroups, LayerKinds, SharedExpertCount, expert_sizes, sigmoid_router
from .base.names import Fused
from .base.rope import Rope
from .base.unused import LAYERS_BEHIND
from .deepseek_v2 import latent_decoder
from .deepseek_v3 import ROPE_INTERLEAVE
from .glm4_moe import MTP_NAMES

GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    fields=(
        *latent_decoder(max_positions=202752, norm_eps=1e-5),
        *latent_fields(query_rank=768, nope=192, value=256, rope=Rope()),
        ATTENTION_BIAS,
        ROPE_INTERLEAVE,
        *expert_sizes(ROUTED_EXPERTS, 64, 4, width=1536),
        SharedExpertCount("n_shared_experts", 1, default_size=1536),
        LayerKinds(),
        *sigmoid_router(default_scale=1.8),
        ExpertGroups(),
    ),
    names=MTP_NAMES,
    other_names=(replace(MTP_NAMES, form="fused", experts=Fused()),),
    unused=LAYERS_BEHIND,
)
