"""ernie4_5: llama with rotation in pairs and one flag for the biases of all layers."""

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Fixed, Spread
from .base.rope import Rope

ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    fields=(
        *decoder_fields(
            max_positions=131072,
            pad=0,
            norm_eps=1e-5,
            kv_heads=2,
            head_dim=128,
            tied=True,
            without=("attention_dropout",),  # which transformers never applies
        ),
        Spread("use_bias", ("attention.add_qkv_bias", "attention.add_output_bias", "mlp.bias"), null=True),
        Fixed("rope.style", "interleaved"),
        Rope(theta=5e5),
    ),
)
