"""granite: llama with multipliers of embeddings, scores, residuals and logits (arXiv 2405.04324)."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Converted, Field
from .base.rope import Rope

MULTIPLIERS = (
    Field("embedding_multiplier", "embedding.multiplier", float, 1.0),
    Field("attention_multiplier", "attention.softmax_scale", float, 1.0),
    Field("residual_multiplier", "residual_multiplier", float, 1.0),
    Converted("logits_scaling", "embedding.logits_multiplier", 1.0, lambda x: 1 / x, lambda x: 1 / x),
    Rope(),
)
GRANITE_COMMON = (*decoder_fields(max_positions=2048), ATTENTION_BIAS, *MULTIPLIERS)

GRANITE = Family(
    model_type="granite",
    fields=(*GRANITE_COMMON, Field("mlp_bias", "mlp.bias", bool, False)),
)
