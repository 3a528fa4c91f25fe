"""qwen3_moe: qwen3's attention, experts in chosen layers, top-k weights divided by their sum on request."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed, OneOf
from .base.layer_fields import AllLayersWindow
from .base.moe_fields import RouterLoss, SparseLayers
from .base.names import Fused, Names
from .base.rope import Rope

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *decoder_fields(max_positions=32768, kv_heads=4),
        Fixed("attention.qk_layernorm", "head", ("use_qk_norm",)),  # Qwen3-Coder says so, too
        ATTENTION_BIAS,
        OneOf(("num_experts", "num_local_experts"), "moe.num_moe_experts", int, 128),
        Field("num_experts_per_tok", "moe.moe_router_topk", int, 8),
        Field("moe_intermediate_size", "moe.moe_ffn_hidden_size", int, 768),
        Field("norm_topk_prob", "moe.router.normalize", bool, False),
        SparseLayers(),
        RouterLoss(),
        AllLayersWindow(default=4096, enabled_by="use_sliding_window"),
        Rope(),
    ),
    other_names=(Names(form="fused", experts=Fused()),),
)
