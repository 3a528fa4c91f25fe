"""glm4: norms before and after each sublayer, half of each head rotated in pairs, fused gate and up projection."""

from __future__ import annotations

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed
from .base.names import Names
from .base.rope import Rope

GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    fields=(
        *decoder_fields(max_positions=131072, pad=151329, norm_eps=1.5625e-7, kv_heads=2, head_dim=128),
        Field("attention_bias", "attention.add_qkv_bias", bool, True),
        Fixed("block", "sandwich"),
        Fixed("rope.style", "interleaved"),
        Rope(partial=0.5),
    ),
    names=Names(
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        fc1=("mlp.gate_up_proj",),
    ),
)
