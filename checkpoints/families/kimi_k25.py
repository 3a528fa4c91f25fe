"""kimi_k25: a deepseek_v3, which published files call kimi_k2, beside a model that sees images (arXiv 2602.02276)."""

from __future__ import annotations

from .base.text_part import TextPart, with_images
from .deepseek_v3 import DEEPSEEK_V3, KIMI_K2

KIMI_K25 = with_images("kimi_k25", "KimiK25ForConditionalGeneration", TextPart((DEEPSEEK_V3, KIMI_K2)))
