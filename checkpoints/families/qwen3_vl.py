"""qwen3_vl: a qwen3 beside a model that sees images (arXiv 2511.21631); the positions of a text are qwen3's."""

from .base.text_part import TextPart, with_images
from .qwen3 import QWEN3

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}

QWEN3_VL = with_images(
    "qwen3_vl", "Qwen3VLForConditionalGeneration", TextPart((QWEN3,), _DEFAULTS, kind="qwen3_vl_text"), prefix=None
)
