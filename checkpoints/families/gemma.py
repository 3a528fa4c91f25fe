"""gemma: RMSNorm with 1 + weight, embeddings times sqrt(hidden size), GELU gates (arXiv 2403.08295)."""

from te_models.config import ModelConfig

from .base.common import ACTIVATIONS, ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Choice, Entry, Fixed, HFConfig, OwnEntry, Values, fixed, read_typed
from .base.rope import Rope

GEMMA_COMMON = (
    *fixed({"norm.layernorm_zero_centered_gamma": True, "norm.cast_order": "weight_first"}),
    Fixed("embedding.multiplier", "sqrt_hidden_in_weight_dtype"),
    ATTENTION_BIAS,
)

_TANH = "gelu_pytorch_tanh"


def gemma_fields(*, max_positions: int, kv_heads: int = 4, without: tuple[str, ...] = ()) -> tuple[Entry, ...]:
    """Return the fields of decoders that all families from gemma2 on have."""
    return decoder_fields(
        max_positions=max_positions,
        pad=0,
        kv_heads=kv_heads,
        head_dim=256,
        tied=True,
        activation=_TANH,
        activation_name="hidden_activation",
        without=without,
    )


class HiddenActivation(OwnEntry):
    """`hidden_activation`; without it `hidden_act`, where "gelu" means the tanh form, as published files have it: with
    that Gemma was trained, and transformers 4 computed. transformers 5.17 does not read the first name and takes the
    second at its word."""

    names = ("hidden_act", "hidden_activation")

    def read(self, hf: HFConfig) -> Values:
        name = "hidden_act" if hf.get("hidden_activation") is None else "hidden_activation"
        value = read_typed(hf, name, str, _TANH)
        value = _TANH if (name, value) == ("hidden_act", "gelu") else value
        return Choice(name, "mlp.activation", ACTIVATIONS, _TANH).read({name: value})

    def write(self, config: ModelConfig) -> Values:
        values = Choice("hidden_act", "mlp.activation", ACTIVATIONS, _TANH).write(config)
        return values | ({"hidden_activation": "gelu"} if config.mlp.activation == "gelu" else {})


GEMMA = Family(
    model_type="gemma",
    fields=(
        *decoder_fields(max_positions=8192, pad=0, kv_heads=16, head_dim=256, tied=True, without=("hidden_act",)),
        HiddenActivation(),
        *GEMMA_COMMON,
        Rope(),
    ),
)
