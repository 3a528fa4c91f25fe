"""mellum: qwen3_moe with windows and a rotary base for each kind of layer."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Fixed
from .base.layer_fields import LayerPattern
from .base.moe_fields import NUM_EXPERTS, LayerKinds, RouterLoss, expert_sizes
from .base.names import Fused, Names
from .base.rope import RopePerLayerType
from .base.unused import Unused

MELLUM = Family(
    model_type="mellum",
    fields=(
        *decoder_fields(max_positions=131072, kv_heads=4, head_dim=128),
        Fixed("attention.qk_layernorm", "head"),
        ATTENTION_BIAS,
        *expert_sizes(NUM_EXPERTS, 64, 8, width=896, normalize=True),
        LayerKinds(dense=0),
        RouterLoss(),
        LayerPattern(window=1024, period=1),
        RopePerLayerType(theta=5e5, sliding_theta=1e4, older=False),
    ),
    other_names=(Names(form="fused", experts=Fused()),),
    unused=Unused(("*.rotary_emb.inv_freq", "mtp.*")),
)
