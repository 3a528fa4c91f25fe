"""hunyuan_v1_moe: norms of q and k behind the rotation, dynamic rotary base, a shared expert (arXiv 2411.02265)."""

from dataclasses import dataclass, replace
from typing import Any

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Fixed, HFConfig, OneOf, Only, Values, fixed, get_path, shorten_value
from .base.moe_fields import ExpertSize
from .base.names import Fused, Names
from .base.rope import Rope


@dataclass(frozen=True)
class SameInAllLayers:
    """A number, or a list of equal numbers with one for each layer: published files have such lists."""

    hf: str
    path: str
    other: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hf, self.other)

    def read(self, hf: HFConfig) -> Values:
        single = {name: _single(name, hf[name]) for name in self.names if name in hf}
        return OneOf(self.names, self.path, int, 1).read(single)

    def write(self, config: ModelConfig) -> Values:
        return {self.hf: get_path(config, self.path)}


def _single(name: str, value: Any) -> Any:
    if not isinstance(value, list) or not value:
        return value
    if any(other != value[0] for other in value):
        raise CheckpointError(f"config.json has {name} = {shorten_value(value)}; layers that differ are not supported")
    return value[0]


@dataclass(frozen=True)
class SwitchedOff:
    """Features of the original code that transformers' class does not have. Published files say false where other
    families say null or 1; false is not the number 0."""

    names: tuple[str, ...]

    def read(self, hf: HFConfig) -> Values:
        for name in self.names:
            value = hf.get(name)
            if value is not None and value is not False and (value is True or value != 1):
                raise CheckpointError(f"config.json has {name} = {shorten_value(value)}; supported: false")
        return {}

    def write(self, config: ModelConfig) -> Values:
        return {}


QK_NORMS = ("self_attn.query_layernorm", "self_attn.key_layernorm")
IGNORED_IN_ROPE = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_FORM = Names(
    qk_norms=QK_NORMS,
    router="mlp.gate.wg",
    shared_fc1=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_fc2="mlp.shared_mlp.down_proj",
)

HUNYUAN_V1_MOE = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    fields=(
        *decoder_fields(max_positions=2048, pad=0, norm_eps=1e-5),
        ExpertSize(shared=True),
        ATTENTION_BIAS,
        Only("use_qk_norm", True),
        SwitchedOff(("n_group", "topk_group", "group_limited_greedy", "routed_scaling_factor", "use_cla")),
        *fixed({"attention.qk_layernorm": "head", "attention.qk_layernorm_after_rope": True}),
        SameInAllLayers("num_experts", "moe.num_moe_experts", "num_local_experts"),
        SameInAllLayers("moe_topk", "moe.moe_router_topk", "num_experts_per_tok"),
        Fixed("moe.router.dtype", "float32"),
        # transformers 5.17 forgets `alpha` in sequences longer than max_position_embeddings; the release does not.
        Rope(alpha=True, extra=IGNORED_IN_ROPE),
    ),
    names=_FORM,
    other_names=(replace(_FORM, form="fused", experts=Fused()),),
    keeps_dtype=("*.router.weight",),
)
