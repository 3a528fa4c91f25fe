"""cohere2: attention and MLP side by side behind one LayerNorm; three of four layers have a window and rotate in pairs,
the others see everything and have no position encoding (arXiv 2504.00698)."""

from .base.common import decoder_fields
from .base.family import Family
from .base.layer_fields import LayerPattern
from .base.names import Names
from .base.rope import Rope
from .cohere import COHERE_COMMON

COHERE2 = Family(
    model_type="cohere2",
    fields=(
        *decoder_fields(max_positions=8192, pad=0, norm_eps=1e-5, norm_name="layer_norm_eps", tied=True),
        *COHERE_COMMON,
        LayerPattern(window=4096, period=4, pattern=True, unrotated=True),
        Rope(),
    ),
    names=Names(norms=("input_layernorm", None, None, None)),
)
