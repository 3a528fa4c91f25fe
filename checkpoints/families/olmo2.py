"""olmo2: norms after the sublayers only, and over all of q and of k (arXiv 2501.00656)."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import fixed
from .base.names import POST, Names
from .base.rope import Rope

OLMO2_COMMON = (
    *fixed({"block": "post", "norm.cast_order": "weight_first", "attention.qk_layernorm": "full"}),
    ATTENTION_BIAS,
)

OLMO2 = Family(
    model_type="olmo2",
    fields=(*decoder_fields(max_positions=2048, pad=1, norm_eps=1e-5), *OLMO2_COMMON, Rope()),
    names=Names(norms=POST),
)
