"""smollm3: llama without position encoding in every fourth layer."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field
from .base.layer_fields import UnrotatedLayers
from .base.rope import Rope

SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=(
        *decoder_fields(max_positions=32768, pad=128004, kv_heads=4, tied=True),
        ATTENTION_BIAS,
        Field("mlp_bias", "mlp.bias", bool, False),
        UnrotatedLayers(),
        Rope(theta=2e6),
    ),
)
