"""gemma2: gemma with norms around each sublayer, soft-capping, a window in every other layer (arXiv 2408.00118)."""

from .base.family import Family
from .base.fields import Converted, Fixed, Nullable
from .base.layer_fields import LayerPattern
from .base.names import SANDWICH, Names
from .base.rope import Rope
from .gemma import GEMMA_COMMON, gemma_fields

GEMMA2_COMMON = (
    *GEMMA_COMMON,
    Fixed("block", "sandwich"),
    Converted(
        "query_pre_attn_scalar", "attention.softmax_scale", 256.0, lambda x: x**-0.5, lambda x: x**-2, whole=True
    ),
)

GEMMA2 = Family(
    model_type="gemma2",
    fields=(
        *gemma_fields(max_positions=8192),
        *GEMMA2_COMMON,
        LayerPattern(window=4096, period=2),
        Nullable("attn_logit_softcapping", "attention.softcap", 50.0),
        Nullable("final_logit_softcapping", "embedding.logits_softcap", 30.0),
        Rope(),
    ),
    names=Names(norms=SANDWICH),
)
