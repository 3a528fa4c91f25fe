"""olmo_hybrid: the gated delta rule with a doubled step in layers with norms before their sublayers, olmo3's attention
in layers with norms after them (OLMo Hybrid)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from te_models.config import ModelConfig

from .base.common import ATTENTION_BIAS, SILU, decoder_fields
from .base.delta_names import SeparateDeltaNames
from .base.family import Family
from .base.fields import REQUIRED, Fixed, HFConfig, Values, fixed, read_typed
from .base.names import POST, PRE, Names
from .base.recurrent import MixerField, Nested, RecurrentLayers
from .base.rope import Rope


class OptionalRope(Rope):
    """The rotary embedding; a base that is null (not absent) turns rotation off."""

    def read(self, hf: HFConfig) -> Values:
        values = hf.get("rope_scaling") or hf.get("rope_parameters")
        where = values if isinstance(values, dict) and "rope_theta" in values else hf
        if where.get("rope_theta", self.theta) is None:
            return {"embedding.position_embedding_type": "none"}
        return super().read(hf)

    def write(self, config: ModelConfig) -> Values:
        if config.embedding.position_embedding_type == "none":
            return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
        return super().write(config)


@dataclass(frozen=True)
class DerivedField(MixerField):
    """A field of the mixer that follows from others where it is null or absent."""

    derived: Callable[[Mapping[str, Any]], int] = lambda hf: read_typed(hf, "num_attention_heads", int, REQUIRED)

    def value(self, hf: HFConfig) -> int:
        """Return the field, or what follows."""
        return self.derived(hf) if hf.get(self.hf) is None else read_typed(hf, self.hf, int, REQUIRED)

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        return {self.name: self.value(hf)}


_KEY_HEADS = DerivedField("linear_num_key_heads", "num_key_heads", int)
_KEY_DIM = DerivedField(
    "linear_key_head_dim",
    "key_head_dim",
    int,
    derived=lambda hf: int(0.75 * read_typed(hf, "hidden_size", int, REQUIRED) / max(_KEY_HEADS.value(hf), 1)),
)
_VALUE_DIM = DerivedField("linear_value_head_dim", "value_head_dim", int, derived=lambda hf: 2 * _KEY_DIM.value(hf))


class OlmoHybridLayers(RecurrentLayers):
    """`layer_types`; it also says where the norms of a layer are."""

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        found = super().read(hf, nested)
        blocks = ["post" if name == "attention" else "pre" for name in found.get("layer_mixers", ())]
        return found | ({"layer_blocks": blocks} if blocks else {})


def _pattern(hf: HFConfig, layers: int) -> list[str]:
    """Every fourth layer has attention, or the last one of fewer."""
    attends = {i for i in range(layers) if i % 4 == 3} or {layers - 1}
    return ["full_attention" if i in attends else "linear_attention" for i in range(layers)]


_STARTS = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
"""Fields of how random weights start."""
_DELTA = SeparateDeltaNames("linear_attn.", decay="a_proj")
_FORM = Names(
    norms=POST,
    recurrent_norms=("attention_layer_norm", None, "feedforward_layer_norm", None),
    mixers={"gated_delta": _DELTA},
)

OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    fields=(
        *decoder_fields(max_positions=65536, pad=100277, activations=SILU),
        ATTENTION_BIAS,
        Fixed("block", "post", _STARTS),
        *fixed({"norm.cast_order": "weight_first", "attention.qk_layernorm": "full"}),
        OptionalRope(),
    ),
    mixers=OlmoHybridLayers(
        kind="gated_delta",
        parts=(
            _KEY_HEADS,
            DerivedField("linear_num_value_heads", "num_value_heads", int),
            _KEY_DIM,
            _VALUE_DIM,
            MixerField("linear_conv_kernel_dim", "conv_kernel_size", int, 4),
            MixerField("linear_allow_neg_eigval", "allow_neg_eigval", bool, True),
        ),
        fixed={"norm_epsilon": 1e-5},
        pattern=_pattern,
    ),
    names=_FORM,
    other_names=(
        replace(
            _FORM,
            form="saved",  # what transformers writes: it renames the norms of all layers
            norms=(None, "feedforward_layer_norm", None, "post_feedforward_layernorm"),
            mixers={"gated_delta": replace(_DELTA, convolution="thirds")},
        ),
        replace(
            _FORM, form="in-memory", recurrent_norms=PRE, mixers={"gated_delta": replace(_DELTA, convolution="joined")}
        ),
    ),
)
