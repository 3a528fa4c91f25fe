"""olmo3: olmo2 with a window in three of four layers and a rotary embedding for each kind (arXiv 2512.13961)."""

from .base.common import decoder_fields
from .base.family import Family
from .base.layer_fields import LayerPattern
from .base.names import POST, Names
from .base.rope import RopePerLayerType
from .olmo2 import OLMO2_COMMON

OLMO3 = Family(
    model_type="olmo3",
    fields=(
        *decoder_fields(max_positions=2048, pad=1, norm_eps=1e-5),
        *OLMO2_COMMON,
        LayerPattern(window=4096, period=4),
        # Old files have one `rope_theta`, of all layers, and `rope_scaling` (yarn), of the full ones: so the release
        # (transformers 4.57) and the paper. transformers 5.17 gives `rope_theta` to the full layers only, and to the
        # others 500000, as published files say.
        RopePerLayerType(theta=5e5, sliding_theta=5e5),
    ),
    names=Names(norms=POST),
)
