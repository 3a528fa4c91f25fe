"""olmoe: llama with norms over all of q and of k, optional clipping, experts in every layer (arXiv 2409.02060)."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed, Nullable, OneOf
from .base.moe_fields import ExpertSize, RouterLoss
from .base.names import Fused, Names
from .base.rope import Rope

OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    fields=(
        *decoder_fields(max_positions=4096, pad=1, norm_eps=1e-5),
        ExpertSize(),
        ATTENTION_BIAS,
        Fixed("attention.qk_layernorm", "full"),
        Nullable("clip_qkv", "attention.clip_qkv", None),
        OneOf(("num_experts", "num_local_experts"), "moe.num_moe_experts", int, 64),
        Field("num_experts_per_tok", "moe.moe_router_topk", int, 8),
        Field("norm_topk_prob", "moe.router.normalize", bool, False),
        RouterLoss(0.01),
        Rope(),
    ),
    other_names=(Names(form="fused", experts=Fused()),),
)
