"""granitemoe and granitemoeshared: granite with experts in every layer, the second one with a shared expert
(arXiv 2408.13359)."""

from dataclasses import replace

from te_models.config import ModelConfig

from .base.family import Family
from .base.fields import HFConfig, OwnEntry, Values, fixed, get_path, read_typed
from .base.moe_fields import ExpertSize, RouterLoss, expert_sizes
from .base.names import Fused, Names, per_expert
from .granite import GRANITE_COMMON


class SharedSize(OwnEntry):
    """`shared_intermediate_size`: 0 means no shared expert."""

    names = ("shared_intermediate_size",)

    def read(self, hf: HFConfig) -> Values:
        size = read_typed(hf, "shared_intermediate_size", int, 0)
        return {"moe.shared_expert_intermediate_size": size} if size else {}

    def write(self, config: ModelConfig) -> Values:
        return {"shared_intermediate_size": get_path(config, "moe.shared_expert_intermediate_size") or 0}


FORM = Names(
    router="block_sparse_moe.router.layer",
    experts=Fused("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    shared_fc1=("shared_mlp.input_linear",),
    shared_fc2="shared_mlp.output_linear",
)
IN_MEMORY = replace(
    FORM,
    form="fused",
    router="block_sparse_moe.router",
    experts=Fused("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
)
OTHER_FORMS = (IN_MEMORY, per_expert(FORM, "block_sparse_moe.experts"))
EXPERTS = (
    ExpertSize(),
    *expert_sizes("num_local_experts", 8, 2),
    *fixed({"moe.router.score_after_topk": True, "moe.router.normalize": False}),
    RouterLoss(),
)
_FIELDS = (*GRANITE_COMMON, *EXPERTS)

GRANITEMOE = Family(
    model_type="granitemoe", architecture="GraniteMoeForCausalLM", fields=_FIELDS, names=FORM, other_names=OTHER_FORMS
)
GRANITEMOESHARED = Family(
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    fields=(*_FIELDS, SharedSize()),
    names=FORM,
    other_names=OTHER_FORMS,
)
