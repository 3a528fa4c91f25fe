"""olmoe: llama with norms over all of q and of k, optional clipping, experts in every layer (arXiv 2409.02060)."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Fixed, Nullable
from .base.moe_fields import NUM_EXPERTS, ExpertSize, RouterLoss, expert_sizes
from .base.names import Fused, Names
from .base.rope import Rope

OLMOE = Family(
    model_type="olmoe",
    fields=(
        *decoder_fields(max_positions=4096, pad=1, norm_eps=1e-5),
        ExpertSize(),
        ATTENTION_BIAS,
        Fixed("attention.qk_layernorm", "full"),
        Nullable("clip_qkv", "attention.clip_qkv", None),
        *expert_sizes(NUM_EXPERTS, 64, 8, normalize=False),
        RouterLoss(0.01),
        Rope(),
    ),
    other_names=(Names(form="fused", experts=Fused()),),
)
