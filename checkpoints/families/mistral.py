"""mistral: llama with a sliding window in every layer (arXiv 2310.06825)."""

from __future__ import annotations

from .common import decoder_fields
from .family import Family
from .layer_fields import AllLayersWindow
from .rope import Rope

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(*decoder_fields(max_positions=131072, kv_heads=8), AllLayersWindow(default=4096), Rope()),
)
