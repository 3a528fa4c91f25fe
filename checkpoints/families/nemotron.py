"""nemotron: LayerNorm with 1 + weight, squared ReLU without gate, half of each head rotated (arXiv 2402.16819)."""

from .base.common import ATTENTION_BIAS, decoder_fields, layer_norm_entries
from .base.family import Family
from .base.fields import Field, fixed
from .base.names import Names
from .base.rope import Rope

NEMOTRON = Family(
    model_type="nemotron",
    fields=(
        *decoder_fields(max_positions=4096, norm_eps=1e-5, norm_name="norm_eps", activation="relu2", init_std=0.0134),
        *layer_norm_entries(bias=True),
        *fixed({"norm.layernorm_zero_centered_gamma": True, "mlp.gated": False}),
        ATTENTION_BIAS,
        Field("mlp_bias", "mlp.bias", bool, False),
        Rope(partial=0.5),
    ),
    names=Names(fc1=("mlp.up_proj",)),
)
