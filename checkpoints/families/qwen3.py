"""qwen3: RMSNorm on each query and key head; optional biases; windows per layer (arXiv 2505.09388)."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Fixed
from .base.layer_fields import PerLayerWindow
from .base.rope import Rope

QWEN3 = Family(
    model_type="qwen3",
    fields=(
        *decoder_fields(max_positions=32768, kv_heads=32, head_dim=128),
        Fixed("attention.qk_layernorm", "head", ("use_qk_norm",)),  # Qwen3-Coder says so, too
        ATTENTION_BIAS,
        PerLayerWindow(),
        Rope(),
    ),
)
