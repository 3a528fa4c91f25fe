"""mixtral: experts in every layer, top-k of a softmax, weights divided by their sum (arXiv 2401.04088)."""

from .base.common import decoder_fields
from .base.family import Family
from .base.layer_fields import AllLayersWindow
from .base.moe_fields import ExpertSize, RouterLoss, expert_sizes
from .base.names import Fused, Names, PerExpert
from .base.rope import Rope

W1_W3_W2 = PerExpert(*(f"block_sparse_moe.experts.{{e}}.{name}" for name in ("w1", "w3", "w2")))
"""Mixtral's names for gate, up and down."""

MIXTRAL = Family(
    model_type="mixtral",
    fields=(
        *decoder_fields(max_positions=131072, norm_eps=1e-5, kv_heads=8),
        ExpertSize(),
        *expert_sizes("num_local_experts", 8, 2),
        RouterLoss(),
        AllLayersWindow(default=None),
        Rope(theta=1e6),
    ),
    names=Names(router="block_sparse_moe.gate", experts=W1_W3_W2),
    other_names=(Names(form="fused", experts=Fused()),),
)
