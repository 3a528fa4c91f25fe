"""seed_oss: llama with biases of q, k and v, and one of the output on request."""

from .base.common import Dropouts, decoder_fields
from .base.family import Family
from .base.fields import Field
from .base.rope import Rope

SEED_OSS = Family(
    model_type="seed_oss",
    fields=(
        *decoder_fields(max_positions=524288, kv_heads=8, head_dim=128, dropout=0.1, pad=1),
        Field("attention_bias", "attention.add_qkv_bias", bool, True),
        Field("attention_out_bias", "attention.add_output_bias", bool, False),
        Field("mlp_bias", "mlp.bias", bool, False),
        Dropouts("residual_dropout", None, 0.1),
        Rope(),
    ),
)
