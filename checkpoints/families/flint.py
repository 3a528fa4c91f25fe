"""flint: qwen3_moe's attention with sinks, windowed layers that rotate beside full ones that do not, a sigmoid router,
a shared expert."""

from dataclasses import replace

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field, fixed
from .base.layer_fields import LayerPattern
from .base.moe_fields import NUM_EXPERTS, RouterLoss, SparseLayers, expert_sizes
from .base.names import Fused, Names
from .base.rope import Rope


def _is_full(layer: int, layers: int) -> bool:
    return layer < 2 or layer % 4 == 1 or layer == layers - 1


_FORM = Names(
    sinks="self_attn.softmax_offset",
    shared_fc1=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_fc2="mlp.shared_expert.down_proj",
)

FLINT = Family(
    model_type="flint",
    fields=(
        *decoder_fields(max_positions=262144, kv_heads=4, head_dim=128),
        ATTENTION_BIAS,
        *fixed({"norm.cast_order": "weight_first", "attention.qk_layernorm": "head", "attention.sinks": True}),
        *expert_sizes(NUM_EXPERTS, 256, 6, width=512, shared=1024),
        SparseLayers(dense=(0, 1)),
        *fixed({"moe.router.score": "sigmoid", "moe.router.dtype": "float32"}),
        Field("norm_topk_prob", "moe.router.normalize", bool, True),
        RouterLoss(0.0005),
        LayerPattern(window=513, period=4, unrotated=True, full=_is_full),
        Rope(),
    ),
    names=_FORM,
    other_names=(replace(_FORM, form="fused", experts=Fused(), sinks="self_attn.sinks"),),
    keeps_dtype=("*.mlp.router.weight", "*.core_attention.softmax_offset"),
)
