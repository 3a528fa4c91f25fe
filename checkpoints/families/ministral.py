"""ministral: mistral whose layers say one by one whether they have the window."""

from .base.common import decoder_fields
from .base.family import Family
from .base.layer_fields import LayerPattern
from .base.rope import Rope

MINISTRAL = Family(
    model_type="ministral",
    fields=(*decoder_fields(max_positions=131072, kv_heads=8), LayerPattern(window=4096, period=None), Rope()),
)
