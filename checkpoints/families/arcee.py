"""arcee: llama with squared ReLU and no gate."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed
from .base.names import Names
from .base.rope import Rope

ARCEE = Family(
    model_type="arcee",
    fields=(
        *decoder_fields(max_positions=4096, norm_eps=1e-5, activation="relu2"),
        Fixed("mlp.gated", False),
        ATTENTION_BIAS,
        Field("mlp_bias", "mlp.bias", bool, False),
        Rope(),
    ),
    names=Names(fc1=("mlp.up_proj",)),
)
