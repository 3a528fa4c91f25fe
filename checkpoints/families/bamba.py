"""bamba: Mamba-2 in most layers, attention with half of each head rotated in those that config.json lists."""

from te_models.config import ModelConfig

from .base.common import ATTENTION_BIAS, SILU, decoder_fields
from .base.family import Family
from .base.fields import Field, HFConfig, Values, read_typed
from .base.names import Names
from .base.recurrent import Mamba2Names, RecurrentLayers
from .base.rope import Rope
from .granitemoehybrid import MAMBA_PARTS


def _pattern(hf: HFConfig, layers: int) -> list[str]:
    full = read_typed(hf, "attn_layer_indices", list, None) or []
    return ["full_attention" if i in full else "linear_attention" for i in range(layers)]


class AttentionIndices(RecurrentLayers):
    """`attn_layer_indices` in place of `layer_types`."""

    def write(self, config: ModelConfig) -> Values:
        values = super().write(config)
        kinds = values.pop("layer_types")
        return values | {"attn_layer_indices": [i for i, kind in enumerate(kinds) if kind == self.attention[0]]}


BAMBA = Family(
    model_type="bamba",
    fields=(
        *decoder_fields(max_positions=262144, norm_eps=1e-5, kv_heads=8, pad=0, activations=SILU),
        ATTENTION_BIAS,
        Field("mlp_bias", "mlp.bias", bool, False),
        Rope(partial=0.5),
    ),
    mixers=AttentionIndices(
        kind="mamba2", parts=MAMBA_PARTS, pattern=_pattern, extra=("attn_layer_indices", "mamba_expand")
    ),
    names=Names(
        final_norm="model.final_layernorm",
        norms=("input_layernorm", None, "pre_ff_layernorm", None),
        fc1=("feed_forward.gate_proj", "feed_forward.up_proj"),
        fc2="feed_forward.down_proj",
        mixers={"mamba2": Mamba2Names()},
    ),
)
