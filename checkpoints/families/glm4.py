"""glm4: glm with norms after each sublayer, too."""

from .base.family import Family
from .base.fields import Fixed
from .base.names import Names
from .glm import GLM_COMMON

GLM4 = Family(
    model_type="glm4",
    fields=(*GLM_COMMON, Fixed("block", "sandwich")),
    names=Names(
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        fc1=("mlp.gate_up_proj",),
    ),
)
