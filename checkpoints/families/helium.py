"""helium: llama with rotation in pairs and the norm's weight applied before rounding."""

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed
from .base.rope import Rope

HELIUM = Family(
    model_type="helium",
    fields=(
        *decoder_fields(max_positions=4096, norm_eps=1e-8, kv_heads=20, head_dim=128, pad=3),
        Fixed("norm.cast_order", "weight_first"),
        Field("attention_bias", "attention.add_qkv_bias", bool, False),
        Field("mlp_bias", "mlp.bias", bool, False),
        Fixed("rope.style", "interleaved"),
        Rope(theta=100000.0),
    ),
)
