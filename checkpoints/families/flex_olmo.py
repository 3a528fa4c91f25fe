"""flex_olmo: olmo2's block with experts in every layer (arXiv 2507.07024)."""

from .base.common import decoder_fields
from .base.family import Family
from .base.moe_fields import NUM_EXPERTS, ExpertSize, RouterLoss, expert_sizes
from .base.names import POST, Fused, Names
from .base.rope import Rope
from .olmo2 import OLMO2_COMMON

FLEX_OLMO = Family(
    model_type="flex_olmo",
    fields=(
        *decoder_fields(max_positions=4096, pad=100277),
        *OLMO2_COMMON,
        ExpertSize(),
        *expert_sizes(NUM_EXPERTS, 7, 5, normalize=False),
        RouterLoss(0.01),
        Rope(theta=5e5),
    ),
    names=Names(norms=POST),
    other_names=(Names(form="fused", norms=POST, experts=Fused()),),
)
