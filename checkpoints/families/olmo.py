"""olmo: LayerNorm without parameters, optional clipping of q, k and v (arXiv 2402.00838)."""

from .base.common import ATTENTION_BIAS, decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Fixed, Nullable
from .base.rope import Rope

OLMO = Family(
    model_type="olmo",
    fields=(
        *decoder_fields(max_positions=2048, pad=1, without=("rms_norm_eps",)),
        *layer_norm_entries(bias=False, weight=False),
        Fixed("norm.layernorm_epsilon", 1e-5),
        ATTENTION_BIAS,
        Nullable("clip_qkv", "attention.clip_qkv", None),
        Rope(),
    ),
)
