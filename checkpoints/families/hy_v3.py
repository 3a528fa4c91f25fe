"""hy_v3: qwen3's attention, a sigmoid router with a bias for the choice, shared experts."""

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed, fixed
from .base.moe_fields import NUM_EXPERTS, LayerKinds, SharedExpertCount, expert_sizes
from .base.names import Fused, Names
from .base.rope import Rope
from .base.unused import LAYERS_BEHIND

_FORM = Names(
    router="mlp.router.gate",
    selection_bias="mlp.expert_bias",
    shared_fc1=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_fc2="mlp.shared_mlp.down_proj",
)
_IN_MEMORY = Names(form="fused", selection_bias="mlp.e_score_correction_bias", experts=Fused())

HY_V3 = Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    fields=(
        *decoder_fields(max_positions=131072, norm_eps=1e-5, kv_heads=8, head_dim=128, init_std=0.006),
        Fixed("attention.qk_layernorm", "head"),
        ATTENTION_BIAS,
        Field("mlp_bias", "mlp.bias", bool, False),
        *expert_sizes(NUM_EXPERTS, 192, 8, width=1536),
        SharedExpertCount("num_shared_experts", 1, default_size=1536),
        LayerKinds(),
        *fixed({"moe.router.score": "sigmoid", "moe.router.expert_bias": True, "moe.router.normalize_eps": 1e-20}),
        Fixed("moe.router.dtype", "float32"),
        Field("router_scaling_factor", "moe.router.scaling_factor", float, 2.826),
        Rope(theta=11158840.0),
    ),
    names=_FORM,
    other_names=(_IN_MEMORY,),
    unused=LAYERS_BEHIND,
)
