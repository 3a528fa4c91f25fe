"""jais2: LayerNorm, squared ReLU without gate, biases everywhere but in the output layer."""

from .base.common import decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Field, Fixed, Spread
from .base.names import Names
from .base.rope import Rope

JAIS2 = Family(
    model_type="jais2",
    fields=(
        *decoder_fields(max_positions=8192, norm_eps=1e-5, norm_name="layer_norm_eps", activation="relu2"),
        *layer_norm_entries(bias=True),
        Fixed("mlp.gated", False),
        Spread("attention_bias", ("attention.add_qkv_bias", "attention.add_output_bias"), True),
        Field("mlp_bias", "mlp.bias", bool, True),
        Rope(),
    ),
    names=Names(fc1=("mlp.up_proj",)),
)
