"""kolibri1: windowed layers that rotate beside full ones that do not, norms before and after each sublayer, experts in
all layers, chosen by logits and a bias."""

from dataclasses import replace

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed, fixed
from .base.layer_fields import LayerPattern
from .base.moe_fields import NUM_EXPERTS, ExpertSize, expert_sizes
from .base.names import Fused, Names
from .base.rope import Rope

_FORM = Names(
    norms=("input_layernorm", "post_attn_norm", "post_attention_layernorm", "post_ffn_norm"),
    selection_bias="moe.router.expert_bias",
)
_IN_MEMORY = replace(
    _FORM,
    form="fused",
    norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    experts=Fused(),
    selection_bias="mlp.gate.e_score_correction_bias",
)

KOLIBRI1 = Family(
    model_type="kolibri1",
    fields=(
        *decoder_fields(max_positions=262144, kv_heads=4, head_dim=128, without=("intermediate_size",)),
        ExpertSize(name="moe_intermediate_size", default=512, dense=True),
        *fixed({"block": "sandwich", "attention.qk_layernorm": "head"}),
        *expert_sizes(NUM_EXPERTS, 384, 6, shared=512),
        Fixed("moe.router.score", "sigmoid"),
        Fixed("moe.router.score_after_topk", True),  # the bias is added to logits
        *fixed({"moe.router.expert_bias": True, "moe.router.dtype": "float32"}),
        Field("norm_topk_prob", "moe.router.normalize", bool, False),
        LayerPattern(window=513, period=5, unrotated="beside windows"),
        Rope(),
    ),
    names=_FORM,
    other_names=(_IN_MEMORY,),
)
