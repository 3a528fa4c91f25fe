"""ernie4_5_moe: rotation in pairs, a softmax router whose bias is added behind the softmax, shared experts."""

from dataclasses import replace

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import decoder_fields
from .base.family import Family
from .base.fields import REQUIRED, Field, Fixed, HFConfig, OneOf, OwnEntry, Spread, Values, fixed, get_path, read_typed
from .base.moe_fields import RouterLoss, SharedExpertCount
from .base.names import Fused, Names
from .base.rope import Rope
from .base.unused import Unused


class LayerRange(OwnEntry):
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index` has experts."""

    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")

    def read(self, hf: HFConfig) -> Values:
        start, end, interval = (read_typed(hf, name, int, default) for name, default in zip(self.names, (1, -1, 1)))
        layers = read_typed(hf, "num_hidden_layers", int, REQUIRED)
        if interval < 1:
            raise CheckpointError(f"config.json has moe_layer_interval = {interval}; allowed: a positive integer")
        last = layers - 1 if end == -1 else min(end, layers - 1)
        return {"moe.layers": [i for i in range(max(start, 0), last + 1) if (i + 1) % interval == 0]}

    def write(self, config: ModelConfig) -> Values:
        layers = [i for i in range(config.num_layers) if config.is_moe_layer(i)] or [config.num_layers]
        interval = layers[1] - layers[0] if len(layers) > 1 else 1
        return {"moe_layer_start_index": layers[0], "moe_layer_end_index": layers[-1], "moe_layer_interval": interval}


class SmallestSum(OwnEntry):
    """`moe_norm_min`: the sum of the k probabilities is at least this. That equals adding it if it is small enough to
    vanish beside any sum of softmax probabilities in float32."""

    names = ("moe_norm_min",)

    def read(self, hf: HFConfig) -> Values:
        value = read_typed(hf, "moe_norm_min", float, 1e-12)
        if not 0 <= value <= 1e-9:
            raise CheckpointError(f"config.json has moe_norm_min = {value}; supported: 0 to 1e-9")
        return {"moe.router.normalize_eps": value}

    def write(self, config: ModelConfig) -> Values:
        return {"moe_norm_min": get_path(config, "moe.router.normalize_eps")}


_BIASES = ("attention.add_qkv_bias", "attention.add_output_bias", "mlp.bias", "embedding.output_bias")
_FORM = Names(selection_bias="mlp.moe_statics.e_score_correction_bias", selection_bias_unsqueezed=True)

ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    fields=(
        *decoder_fields(
            max_positions=131072, pad=0, norm_eps=1e-5, kv_heads=4, tied=True, without=("attention_dropout",)
        ),
        Spread("use_bias", _BIASES, null=True),
        OneOf(("moe_num_experts", "num_experts", "num_local_experts"), "moe.num_moe_experts", int, 64),
        OneOf(("moe_k", "num_experts_per_tok"), "moe.moe_router_topk", int, 6),
        Field("moe_intermediate_size", "moe.moe_ffn_hidden_size", int, 1536),
        SharedExpertCount("moe_num_shared_experts", 2, default_size=1536),
        LayerRange(),
        *fixed({"moe.router.expert_bias": True, "moe.router.dtype": "float32"}),
        SmallestSum(),
        RouterLoss(),
        Fixed("rope.style", "interleaved"),
        Rope(theta=5e5),
    ),
    names=_FORM,
    other_names=(
        replace(_FORM, form="fused", experts=Fused(), selection_bias="mlp.gate.moe_statics.e_score_correction_bias"),
    ),
    keeps_dtype=("*.router.expert_bias", "*.router.weight"),
    unused=Unused(("*.rotary_emb.inv_freq", "model.mtp_*", "mtp_*")),
)
