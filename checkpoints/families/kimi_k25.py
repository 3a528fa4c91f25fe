"""kimi_k25: a deepseek_v3 (kimi_k2 in published files) beside a model that sees images (arXiv 2602.02276)."""

from dataclasses import replace

from .base.text_part import TextPart, with_images
from .deepseek_v3 import DEEPSEEK_V3, KIMI_K2

_PUBLISHED = with_images("kimi_k25", "KimiK25ForConditionalGeneration", TextPart((DEEPSEEK_V3, KIMI_K2)))
_SAVED = replace(  # what transformers writes: it calls the layers of both models blocks
    _PUBLISHED.names, form="saved", layer="language_model.model.blocks.{i}"
)
KIMI_K25 = replace(_PUBLISHED, other_names=(*_PUBLISHED.other_names, _SAVED))
