"""deepseek_v32: deepseek_v3 whose queries see the keys that an indexer chooses (arXiv 2512.02556)."""

from dataclasses import replace
from typing import Any

from .base.common import ATTENTION_BIAS
from .base.family import Family
from .base.fields import Entry, Fixed, Only
from .base.indexer import IndexedLayers, indexer_fields
from .base.latent import latent_fields
from .base.moe_fields import ROUTED_EXPERTS, ExpertGroups, LayerKinds, SharedExpertCount, expert_sizes, sigmoid_router
from .base.names import Fused
from .base.rope import Rope
from .base.unused import LAYERS_BEHIND
from .deepseek_v2 import latent_decoder
from .glm4_moe import MTP_NAMES


def sparse_latent(groups: tuple[int, int], max_positions: int, norm_eps: float, **latent: Any) -> tuple[Entry, ...]:
    """Return the fields of deepseek_v32's layer but for its indexer; the arguments are the class's defaults."""
    return (
        *latent_decoder(max_positions=max_positions, norm_eps=norm_eps),
        *latent_fields(rope=Rope(), **latent),
        ATTENTION_BIAS,
        Fixed("rope.style", "interleaved"),
        *expert_sizes(ROUTED_EXPERTS, 256, 8, width=2048),
        SharedExpertCount("n_shared_experts", 1, default_size=2048),
        LayerKinds(dense=3),
        Only("mlp_bias", False, null=True),
        Only("scoring_func", "sigmoid"),
        Only("topk_method", "noaux_tc"),
        *sigmoid_router(default_scale=2.5),
        ExpertGroups(*groups),
        IndexedLayers(),
    )


DEEPSEEK_V32 = Family(
    model_type="deepseek_v32",
    fields=(*sparse_latent((8, 4), 163840, 1e-6, query_rank=1536), *indexer_fields(heads=64, rope_style="half")),
    names=MTP_NAMES,
    other_names=(replace(MTP_NAMES, form="fused", experts=Fused()),),
    unused=LAYERS_BEHIND,
)
