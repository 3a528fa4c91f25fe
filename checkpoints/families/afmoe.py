"""afmoe: windowed layers rotate and full ones do not, attention with an output gate, norms before and after each
sublayer, DeepSeek-V3's router without groups (Arcee Trinity)."""

from dataclasses import replace

from te_models.config import ModelConfig

from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import REQUIRED, Field, Fixed, HFConfig, OwnEntry, Values, fixed, read_typed
from .base.layer_fields import LayerPattern
from .base.moe_fields import NUM_EXPERTS, FirstDense, SharedExpertCount, expert_sizes
from .base.names import Fused, Names
from .base.rope import Rope


class Mup(OwnEntry):
    """`mup_enabled`: embeddings times the square root of their channels."""

    names = ("mup_enabled",)

    def read(self, hf: HFConfig) -> Values:
        enabled = hf.get("mup_enabled") is not None and read_typed(hf, "mup_enabled", bool, False)
        return {"embedding.multiplier": read_typed(hf, "hidden_size", int, REQUIRED) ** 0.5} if enabled else {}

    def write(self, config: ModelConfig) -> Values:
        return {"mup_enabled": config.embedding.multiplier != 1.0}


_FORM = Names(
    norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    router="mlp.router.gate",
    selection_bias="mlp.expert_bias",
)

AFMOE = Family(
    model_type="afmoe",
    fields=(
        *decoder_fields(max_positions=16384, norm_eps=1e-5, head_dim=128),
        ATTENTION_BIAS,
        Mup(),
        *fixed({"block": "sandwich", "norm.cast_order": "weight_first", "attention.qk_layernorm": "head"}),
        Fixed("attention.output_gate", True),
        *expert_sizes(NUM_EXPERTS, 64, 6, width=1408),
        SharedExpertCount("num_shared_experts", 2, default_size=1408),
        FirstDense(1, ("num_dense_layers",)),
        *fixed({"moe.router.score": "sigmoid", "moe.router.expert_bias": True, "moe.router.normalize_eps": 1e-20}),
        Field("route_scale", "moe.router.scaling_factor", float, 1.0),
        LayerPattern(window=1024, period=4, pattern="global_attn_every_n_layers", unrotated=True),
        Rope(),
    ),
    names=_FORM,
    other_names=(replace(_FORM, form="fused", experts=Fused()),),
)
