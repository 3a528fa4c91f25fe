"""flex_olmo: olmo2's block with experts in every layer (arXiv 2507.07024)."""

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, OneOf
from .base.moe_fields import ExpertSize, RouterLoss
from .base.names import POST, Fused, Names
from .base.rope import Rope
from .olmo2 import OLMO2_COMMON

FLEX_OLMO = Family(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    fields=(
        *decoder_fields(max_positions=4096, pad=100277),
        *OLMO2_COMMON,
        ExpertSize(),
        OneOf(("num_experts", "num_local_experts"), "moe.num_moe_experts", int, 7),
        Field("num_experts_per_tok", "moe.moe_router_topk", int, 5),
        Field("norm_topk_prob", "moe.router.normalize", bool, False),
        RouterLoss(0.01),
        Rope(theta=5e5),
    ),
    names=Names(norms=POST),
    other_names=(Names(form="fused", norms=POST, experts=Fused()),),
)
