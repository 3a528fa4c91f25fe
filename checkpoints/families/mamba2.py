"""mamba2: the mixer of Mamba-2 in every layer, and nothing else (arXiv 2405.21060)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Fixed, HFConfig, Only, Values, fixed, read_typed
from .base.names import Names
from .base.recurrent import Mamba2Names, MixerField, RecurrentLayers, TimeStepLimit


@dataclass(frozen=True)
class Expand(MixerField):
    """`expand`: the channels of all heads by hidden_size; the heads must agree."""

    hf: str = "expand"
    name: str = ""
    kind: type = int
    default: Any = 2

    def read(self, hf: HFConfig, nested: Mapping[str, Any]) -> Values:
        expand, heads = read_typed(hf, "expand", int, 2), read_typed(hf, "num_heads", int, 128)
        size = heads * read_typed(hf, "head_dim", int, 64)
        if size != expand * nested["hidden_size"]:
            raise CheckpointError(
                f"config.json has expand = {expand}; allowed: {size} channels of heads by hidden_size"
            )
        return {}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        return {"expand": mixer.size // config.hidden_size}


NO_ATTENTION = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attention_dropout",
    "intermediate_size",
    "hidden_act",
    "max_position_embeddings",
)
"""Of `decoder_fields`: what a model of recurrent mixers alone does not have."""

MAMBA2 = Family(
    model_type="mamba2",
    fields=(
        *decoder_fields(
            max_positions=0,
            norm_eps=1e-5,
            norm_name="layer_norm_epsilon",
            init_std=0.1,
            without=(*NO_ATTENTION, "pad_token_id"),
        ),
        Only("hidden_act", "silu"),
        *fixed({"max_position_embeddings": 2**20, "mlp.ffn_hidden_size": 1}),
        Fixed("embedding.position_embedding_type", "none", ("residual_in_fp32",)),  # which is of rounding alone
    ),
    mixers=RecurrentLayers(
        kind="mamba2",
        parts=(
            MixerField("num_heads", "num_heads", int, 128),
            MixerField("head_dim", "head_dim", int, 64),
            MixerField("state_size", "state_size", int, 128),
            MixerField("n_groups", "num_groups", int, 8),
            MixerField("conv_kernel", "conv_kernel_size", int, 4),
            MixerField("use_bias", "use_bias", bool, False),
            MixerField("use_conv_bias", "use_conv_bias", bool, True),
            Expand(),
            TimeStepLimit(),
        ),
        alone=True,
    ),
    names=Names(
        embedding="backbone.embeddings",
        final_norm="backbone.norm_f",
        layer="backbone.layers.{i}",
        norms=("norm", None, None, None),
        mixers={"mamba2": Mamba2Names("mixer.")},
    ),
)
