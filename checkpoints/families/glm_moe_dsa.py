"""glm_moe_dsa (GLM-5): deepseek_v32's layer, in which some layers take the choice of keys of an earlier one (arXiv
2603.12201)."""

from dataclasses import replace

from .base.family import Family
from .base.indexer import IndexerTypes, indexer_fields
from .base.names import Fused
from .base.unused import LAYERS_BEHIND
from .deepseek_v32 import sparse_latent
from .glm4_moe import MTP_NAMES

GLM_MOE_DSA = Family(
    model_type="glm_moe_dsa",
    fields=(
        *sparse_latent((1, 1), 202752, 1e-5, query_rank=2048, nope=192, value=256),
        *indexer_fields(heads=32, rope_style="interleaved"),
    ),
    mixers=IndexerTypes(),
    names=MTP_NAMES,
    other_names=(replace(MTP_NAMES, form="fused", experts=Fused()),),
    unused=LAYERS_BEHIND,
)
