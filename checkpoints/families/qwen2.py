"""qwen2: biases on q, k and v; windows per layer (arXiv 2407.10671)."""

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Fixed
from .base.layer_fields import PerLayerWindow
from .base.rope import Rope

QWEN2 = Family(
    model_type="qwen2",
    fields=(
        *decoder_fields(max_positions=32768, kv_heads=32),
        Fixed("attention.add_qkv_bias", True),
        PerLayerWindow(),
        Rope(),
    ),
)
