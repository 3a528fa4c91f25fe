"""granite_swa and granitemoe_swa: granite, and granitemoeshared, with windows, sinks and a rotation by layer."""

from dataclasses import replace

from .base.attentions import RopeThetaPerLayer
from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed
from .base.layer_fields import LayerPattern
from .base.names import per_expert
from .granite import MULTIPLIERS
from .granitemoe import EXPERTS, FORM, IN_MEMORY, SharedSize

_PUBLISHED = replace(IN_MEMORY, form="published")
"""Transformers writes what it has in memory, and reads nothing else; `FORM` has granitemoe's names."""

_COMMON = (
    ATTENTION_BIAS,
    *MULTIPLIERS,
    Fixed("attention.sinks", True),
    LayerPattern(window=128, period=4, full=lambda layer, _: layer % 4 == 0),
)

GRANITE_SWA = Family(
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    fields=(
        *decoder_fields(max_positions=8192, norm_eps=1e-5, kv_heads=4, tied=True),
        *_COMMON,
        Field("mlp_bias", "mlp.bias", bool, False),
    ),
    mixers=RopeThetaPerLayer(),
)
GRANITEMOE_SWA = Family(
    model_type="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    fields=(*decoder_fields(max_positions=2048), *_COMMON, *EXPERTS, SharedSize()),
    mixers=RopeThetaPerLayer(),
    names=_PUBLISHED,
    other_names=(per_expert(_PUBLISHED, "block_sparse_moe.experts"), replace(FORM, form="linear", loadable=False)),
)
