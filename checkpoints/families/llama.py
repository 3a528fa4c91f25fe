"""llama: RMSNorm, grouped-query attention, gated MLP, optional biases (arXiv 2302.13971, 2407.21783)."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field
from .base.rope import Rope

LLAMA = Family(
    model_type="llama",
    fields=(*decoder_fields(max_positions=2048), Field("mlp_bias", "mlp.bias", bool, False), ATTENTION_BIAS, Rope()),
)
