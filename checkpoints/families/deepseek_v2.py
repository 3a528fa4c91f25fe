"""deepseek_v2: latent attention, softmax router with groups ranked by their best expert (arXiv 2405.04434)."""

from dataclasses import replace
from typing import Any

from te_models.config import ModelConfig

from .base.common import ATTENTION_BIAS, HeadDim, KeyValueHeads, decoder_fields
from .base.family import Family
from .base.fields import REQUIRED, Field, Fixed, HFConfig, Only, OwnEntry, Values, fixed, get_path, read_typed
from .base.latent import latent_fields
from .base.layer_fields import check_names
from .base.moe_fields import ExpertGroups, FirstDense, SharedExpertCount, expert_sizes
from .base.names import COMMON, Fused
from .base.rope import Rope


class TopKMethod(OwnEntry):
    """`topk_method`: "greedy", or "group_limited_greedy" with `n_group` and `topk_group`."""

    names = ("topk_method", "n_group", "topk_group")

    def read(self, hf: HFConfig) -> Values:
        methods = ("greedy", "group_limited_greedy")
        (method,) = check_names([read_typed(hf, "topk_method", str, "greedy")], "topk_method", methods)
        return {} if method == "greedy" else ExpertGroups(None, None).read(hf)

    def write(self, config: ModelConfig) -> Values:
        if get_path(config, "moe.router.num_groups") is None:
            return {"topk_method": "greedy", "n_group": None, "topk_group": None}
        return {"topk_method": "group_limited_greedy", **ExpertGroups().write(config)}


def latent_decoder(**defaults: Any) -> tuple:
    """Return the fields of a decoder with latent attention: no two heads share keys."""
    return tuple(e for e in decoder_fields(**defaults) if not isinstance(e, (HeadDim, KeyValueHeads)))


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    fields=(
        *latent_decoder(max_positions=2048),
        *latent_fields(query_rank=1536, rope=Rope()),
        ATTENTION_BIAS,
        Field("mlp_bias", "mlp.bias", bool, False),
        Fixed("rope.style", "interleaved"),
        *expert_sizes(("n_routed_experts", "num_experts", "num_local_experts"), 64, REQUIRED, width=1407),
        SharedExpertCount("n_shared_experts", 2, default_size=1407),
        FirstDense(0),
        Only("scoring_func", "softmax"),
        Only("norm_topk_prob", False),
        *fixed({"moe.router.normalize": False, "moe.router.dtype": "float32", "moe.router.group_score": "max"}),
        Field("routed_scaling_factor", "moe.router.scaling_factor", float, 1.0),
        TopKMethod(),
    ),
    other_names=(replace(COMMON, form="fused", experts=Fused()),),
)
