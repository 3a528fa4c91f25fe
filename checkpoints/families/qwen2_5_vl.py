"""qwen2_5_vl: a qwen2 beside a model that sees images (arXiv 2502.13923); the positions of a text are qwen2's."""

from .base.text_part import TextPart, with_images
from .qwen2 import QWEN2

_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}

QWEN2_5_VL = with_images(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    TextPart((QWEN2,), _DEFAULTS, kind="qwen2_5_vl_text", tied_either=True, flat=True),
    prefix="",
)
