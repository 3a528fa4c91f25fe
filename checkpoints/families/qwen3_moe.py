"""qwen3_moe: qwen3's attention, experts in chosen layers, top-k weights divided by their sum on request."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Fixed
from .base.layer_fields import AllLayersWindow
from .base.moe_fields import NUM_EXPERTS, RouterLoss, SparseLayers, expert_sizes
from .base.names import Fused, Names
from .base.rope import Rope

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    fields=(
        *decoder_fields(max_positions=32768, kv_heads=4),
        Fixed("attention.qk_layernorm", "head", ("use_qk_norm",)),  # Qwen3-Coder says so, too
        ATTENTION_BIAS,
        *expert_sizes(NUM_EXPERTS, 128, 8, width=768, normalize=False),
        SparseLayers(),
        RouterLoss(),
        AllLayersWindow(default=4096, enabled_by="use_sliding_window"),
        Rope(),
    ),
    other_names=(Names(form="fused", experts=Fused()),),
)
