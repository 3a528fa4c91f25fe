"""mistral: llama with a sliding window in every layer (arXiv 2310.06825)."""

from .base.common import decoder_fields
from .base.family import Family
from .base.layer_fields import AllLayersWindow
from .base.rope import Rope

MISTRAL = Family(
    model_type="mistral",
    fields=(*decoder_fields(max_positions=131072, kv_heads=8), AllLayersWindow(default=4096), Rope()),
)
