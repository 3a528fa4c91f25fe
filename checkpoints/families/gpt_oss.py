"""gpt_oss: sinks, a window in every other layer, clamped SwiGLU, biases everywhere (arXiv 2508.10925).

Its experts are stored [E, in, out], gate and up columns in turn; as MXFP4, the form of the published files,
[E, out, in] with gate and up rows in turn.
"""

from dataclasses import dataclass, replace

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed, HFConfig, Values, fixed
from .base.layer_fields import LayerPattern
from .base.moe_fields import ExpertSize, RouterLoss, expert_sizes
from .base.names import Fused, Names, per_expert
from .base.rope import AroundRope, Rope

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


_ROPE = Rope(theta=150000.0)


@dataclass(frozen=True)
class YarnByDefault(AroundRope):
    """The rotary embedding, extended by yarn where the file says nothing."""

    rope: Rope = _ROPE

    def read(self, hf: HFConfig) -> Values:
        values = hf.get("rope_scaling") or hf.get("rope_parameters") or _DEFAULT_ROPE
        return self.rope.read({**hf, "rope_scaling": values})


_FORM = Names(router="mlp.router", experts=Fused(transposed=True, interleaved=True))

GPT_OSS = Family(
    model_type="gpt_oss",
    fields=(
        *decoder_fields(max_positions=131072, norm_eps=1e-5, kv_heads=8, head_dim=64),
        ExpertSize(),
        replace(ATTENTION_BIAS, default=True),
        *fixed({"attention.sinks": True, "norm.cast_order": "weight_first"}),
        Field("swiglu_alpha", "mlp.alpha", float, 1.702),
        Fixed("mlp.up_offset", 1.0),
        Field("swiglu_limit", "mlp.clamp", float, 7.0),
        *expert_sizes("num_local_experts", 128, 4),
        *fixed({"moe.bias": True, "moe.router.linear_bias": True, "moe.router.score_after_topk": True}),
        Fixed("moe.router.normalize", False),
        RouterLoss(),
        LayerPattern(window=128, period=2),
        YarnByDefault(),
    ),
    names=_FORM,
    other_names=(per_expert(_FORM, "mlp.experts"),),
)
