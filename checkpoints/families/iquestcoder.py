"""iquestcoder: llama with other defaults. The release's code knows windows and clipping; no release uses them."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field
from .base.rope import Rope

IQUESTCODER = Family(
    model_type="iquestcoder",
    architecture="IQuestCoderForCausalLM",
    fields=(
        *decoder_fields(max_positions=131072, norm_eps=1e-5, kv_heads=8, head_dim=128),
        ATTENTION_BIAS,
        Field("mlp_bias", "mlp.bias", bool, False),
        Rope(),
    ),
)
