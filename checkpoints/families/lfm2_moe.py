"""lfm2_moe: lfm2's layers with experts behind the first ones, chosen by sigmoid scores and a bias (LFM2)."""

from dataclasses import replace

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed
from .base.moe_fields import FirstDense, expert_sizes
from .base.names import Fused, PerExpert
from .base.rope import Rope
from .lfm2 import CONVOLUTIONS, FORM, Tied

_EXPERTS = (f"feed_forward.experts.{{e}}.{name}" for name in ("w1", "w3", "w2"))
_FORM = replace(
    FORM, router="feed_forward.gate", selection_bias="feed_forward.expert_bias", experts=PerExpert(*_EXPERTS)
)

LFM2_MOE = Family(
    model_type="lfm2_moe",
    fields=(
        *decoder_fields(
            max_positions=128_000,
            norm_eps=1e-5,
            norm_name="norm_eps",
            kv_heads=8,
            pad=0,
            without=("tie_word_embeddings", "attention_dropout", "hidden_act"),
        ),
        Tied(),
        Fixed("attention.qk_layernorm", "head"),
        *expert_sizes("num_experts", 32, 4, width=1792),
        FirstDense(2, ("num_dense_layers",)),
        Fixed("moe.router.score", "sigmoid"),
        Field("use_expert_bias", "moe.router.expert_bias", bool, True),
        Fixed("moe.router.normalize_eps", 1e-6),
        Field("norm_topk_prob", "moe.router.normalize", bool, True),
        Field("routed_scaling_factor", "moe.router.scaling_factor", float, 1.0),
        Rope(1_000_000.0),
    ),
    mixers=replace(CONVOLUTIONS, pattern=None, extra=()),
    names=_FORM,
    other_names=(
        replace(
            _FORM, form="fused", experts=Fused("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
        ),
    ),
)
