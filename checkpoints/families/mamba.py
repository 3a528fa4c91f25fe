"""mamba, falcon_mamba: the mixer of Mamba in every layer, and nothing else (arXiv 2312.00752; arXiv 2410.05355)."""

from dataclasses import dataclass, replace
from typing import Any

from te_models.config import ModelConfig

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Entry, Fixed, HFConfig, Only, Values, fixed, read_typed
from .base.names import Names
from .base.recurrent import MambaNames, MixerField, Nested, RecurrentLayers, TimeStepRank
from .mamba2 import NO_ATTENTION


@dataclass(frozen=True)
class Channels(MixerField):
    """`intermediate_size`, or `expand` times hidden_size without it."""

    hf: str = "intermediate_size"
    name: str = "channels"
    kind: type = int

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        expanded = read_typed(hf, "expand", int, 2) * nested["hidden_size"]
        return {"channels": read_typed(hf, "intermediate_size", int, expanded)}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        expand, rest = divmod(mixer.channels, config.hidden_size)
        return {"intermediate_size": mixer.channels} | ({} if rest else {"expand": expand})


_WITHOUT_EFFECT = (
    "residual_in_fp32",  # which is of rounding alone
    *("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor"),  # first values
)
_FIELDS: tuple[Entry, ...] = (
    *decoder_fields(
        max_positions=0,
        norm_eps=1e-5,
        norm_name="layer_norm_epsilon",
        init_std=0.1,
        tied=True,
        without=(*NO_ATTENTION, "pad_token_id"),
    ),
    Only("hidden_act", "silu"),
    *fixed({"max_position_embeddings": 2**20, "mlp.ffn_hidden_size": 1}),
    Fixed("embedding.position_embedding_type", "none", _WITHOUT_EFFECT),
)
_PARTS = (
    Channels(),
    MixerField("state_size", "state_size", int, 16),
    TimeStepRank("time_step_rank"),
    MixerField("conv_kernel", "conv_kernel_size", int, 4),
    MixerField("use_bias", "use_bias", bool, False),
    MixerField("use_conv_bias", "use_conv_bias", bool, True),
)
_NAMES = Names(
    embedding="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{i}",
    norms=("norm", None, None, None),
    mixers={"mamba": MambaNames("mixer.")},
)

MAMBA = Family(
    model_type="mamba",
    fields=_FIELDS,
    mixers=RecurrentLayers(kind="mamba", parts=_PARTS, extra=("expand",), alone=True),
    names=_NAMES,
    other_names=(replace(_NAMES, form="original", embedding="backbone.embedding"),),
)
FALCON_MAMBA = Family(
    model_type="falcon_mamba",
    fields=_FIELDS,
    mixers=RecurrentLayers(
        kind="mamba",
        parts=(*_PARTS, MixerField("mixer_rms_eps", "norm_epsilon", float, 1e-6)),
        fixed={"selection_norm": "without_weight"},
        extra=("expand",),
        alone=True,
    ),
    names=_NAMES,
)
