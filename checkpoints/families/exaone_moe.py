"""exaone_moe: windowed layers rotate and full ones do not, DeepSeek-V3's router, shared experts."""

from dataclasses import replace

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Fixed
from .base.layer_fields import LayerPattern
from .base.moe_fields import NUM_EXPERTS, ExpertGroups, LayerKinds, SharedExpertCount, expert_sizes, sigmoid_router
from .base.names import Fused, Names
from .base.rope import Rope
from .base.unused import Unused

_FORM = Names(selection_bias="mlp.e_score_correction_bias")

EXAONE_MOE = Family(
    model_type="exaone_moe",
    fields=(
        *decoder_fields(max_positions=2048, pad=0, norm_eps=1e-5, kv_heads=32),
        Fixed("attention.qk_layernorm", "head"),
        *expert_sizes(NUM_EXPERTS, 64, 8, width=1024),
        SharedExpertCount("num_shared_experts", 1, default_size=1024),
        LayerKinds(),
        *sigmoid_router(default_scale=2.5),
        ExpertGroups(),
        LayerPattern(window=4096, period=4, pattern=True, unrotated="beside windows"),
        Rope(),
    ),
    names=_FORM,
    other_names=(replace(_FORM, form="fused", experts=Fused(), selection_bias="mlp.gate.e_score_correction_bias"),),
    unused=Unused(("*.rotary_emb.inv_freq", "mtp.*")),
)
