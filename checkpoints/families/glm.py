"""glm: half of each head rotated in pairs, fused gate and up projection, biases on q, k and v (arXiv 2406.12793)."""

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed
from .base.names import Names
from .base.rope import Rope

GLM_COMMON = (
    *decoder_fields(max_positions=131072, pad=151329, norm_eps=1.5625e-7, kv_heads=2, head_dim=128),
    Field("attention_bias", "attention.add_qkv_bias", bool, True),
    Fixed("rope.style", "interleaved"),
    Rope(partial=0.5),
)

GLM = Family(model_type="glm", fields=GLM_COMMON, names=Names(fc1=("mlp.gate_up_proj",)))
