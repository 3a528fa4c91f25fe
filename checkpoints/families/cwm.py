"""cwm: llama with a window in three of four layers, the first of four sees everything (arXiv 2510.02387)."""

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field
from .base.layer_fields import LayerPattern
from .base.rope import Rope

_DEFAULT = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

CWM = Family(
    model_type="cwm",
    fields=(
        *decoder_fields(max_positions=131072, norm_eps=1e-5, kv_heads=8, head_dim=128),
        Field("mlp_bias", "mlp.bias", bool, False),
        LayerPattern(window=8192, period=4, full_first=True),
        Rope(theta=1e6, default=_DEFAULT),
    ),
)
