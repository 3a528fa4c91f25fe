"""qwen2_moe: qwen2's attention, experts in chosen layers beside a shared one behind a gate (arXiv 2407.10671)."""

from dataclasses import replace

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed
from .base.layer_fields import PerLayerWindow
from .base.moe_fields import NUM_EXPERTS, RouterLoss, SparseLayers, expert_sizes
from .base.names import Fused, Names
from .base.rope import Rope

_FORM = Names(
    shared_fc1=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), shared_fc2="mlp.shared_expert.down_proj"
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    fields=(
        *decoder_fields(max_positions=32768, kv_heads=16),
        Field("qkv_bias", "attention.add_qkv_bias", bool, True),
        *expert_sizes(NUM_EXPERTS, 60, 4, width=1408, shared=5632),
        Fixed("moe.shared_expert_gate", True),
        Field("norm_topk_prob", "moe.router.normalize", bool, False),
        SparseLayers(),
        RouterLoss(),
        PerLayerWindow(alternating=True),
        Rope(),
    ),
    names=_FORM,
    other_names=(replace(_FORM, form="fused", experts=Fused()),),
)
