"""starcoder2: LayerNorm, plain GELU MLP, biases, a window in every layer (arXiv 2402.19173)."""

from .base.common import Dropouts, decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Fixed, Spread
from .base.layer_fields import AllLayersWindow
from .base.names import Names
from .base.rope import Rope

STARCODER2 = Family(
    model_type="starcoder2",
    fields=(
        *decoder_fields(
            max_positions=4096,
            norm_eps=1e-5,
            norm_name="norm_epsilon",
            kv_heads=2,
            tied=True,
            activation="gelu_pytorch_tanh",
            init_std=0.018042,
        ),
        *layer_norm_entries(bias=True),
        Fixed("mlp.gated", False),
        Spread("use_bias", ("attention.add_qkv_bias", "attention.add_output_bias", "mlp.bias"), True),
        Dropouts("residual_dropout", "embedding_dropout"),
        AllLayersWindow(default=None),
        Rope(),
    ),
    names=Names(fc1=("mlp.c_fc",), fc2="mlp.c_proj"),
)
