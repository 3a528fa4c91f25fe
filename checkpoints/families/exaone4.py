"""exaone4: norms after the sublayers only, and of each head of q and k; beside layers with a window, those that see
everything have no position encoding (arXiv 2507.11407)."""

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import fixed
from .base.layer_fields import LayerPattern
from .base.names import POST, Names
from .base.rope import Rope

EXAONE4 = Family(
    model_type="exaone4",
    fields=(
        *decoder_fields(max_positions=2048, norm_eps=1e-5, kv_heads=32),
        *fixed({"block": "post", "attention.qk_layernorm": "head"}),
        # Without a window transformers 5.23 divides by zero unless the file has layer_types; here all layers are full.
        LayerPattern(window=4096, period=4, pattern=True, letters=True, unrotated="beside windows"),
        Rope(),
    ),
    names=Names(norms=POST),
)
