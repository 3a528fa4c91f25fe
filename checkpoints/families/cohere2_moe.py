"""cohere2_moe: cohere2 with experts behind the first layers, chosen before their scores are computed, and on request a
shared expert, of which the sum or the mean with the others counts (Command A+)."""

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import decoder_fields
from .base.family import Family
from .base.fields import REQUIRED, Fixed, HFConfig, OwnEntry, Values, read_typed, shorten_value
from .base.layer_fields import LayerPattern
from .base.moe_fields import LayerKinds, SharedExpertCount, expert_sizes
from .base.names import Fused, Names
from .base.rope import Rope
from .cohere import COHERE_COMMON

_PREFIX = "prefix_dense_sliding_window_pattern"


class RotatedPrefix(OwnEntry):
    """`layer_types`, without which every `sliding_window_pattern`-th layer sees everything, counted from the first with
    experts, and every `prefix_dense_sliding_window_pattern`-th before it. Layers that see everything rotate where they
    are dense and that is 1."""

    names = (*LayerPattern(4096, 4, pattern=True).names, _PREFIX)

    def read(self, hf: HFConfig) -> Values:
        sparse = LayerKinds(0).read(hf)["moe.layers"]
        prefix, period = read_typed(hf, _PREFIX, int, 1), read_typed(hf, "sliding_window_pattern", int, 4)
        if hf.get("layer_types") is None:
            if prefix < 1 or period < 1:
                raise CheckpointError(f"config.json has {_PREFIX} = {prefix}; allowed: a positive integer")
            layers, dense = (
                read_typed(hf, "num_hidden_layers", int, 40),
                read_typed(hf, "first_k_dense_replace", int, 0),
            )
            full = [(i + 1) % prefix == 0 if i < dense else (i - dense + 1) % period == 0 for i in range(layers)]
            hf = {**hf, "layer_types": ["full_attention" if one else "sliding_attention" for one in full]}
        values = LayerPattern(4096, 4, unrotated=True).read(hf)
        rotates = [prefix == 1 and i not in sparse for i in range(len(values["layer_types"]))]
        kinds = ["full" if r and kind == "nope" else kind for r, kind in zip(rotates, values["layer_types"])]
        return values | {"layer_types": kinds}

    def write(self, config: ModelConfig) -> Values:
        dense = [i for i in range(config.num_layers) if not config.is_moe_layer(i)]
        unrotated = any(config.layer_type(i) == "nope" for i in dense)
        return LayerPattern(4096, 4).write(config) | {_PREFIX: 4 if unrotated else 1}


class NormKind(OwnEntry):
    """`rms_norm_eps`: null means the LayerNorm of cohere2, with `layer_norm_eps`."""

    names = ("rms_norm_eps", "layer_norm_eps")

    def read(self, hf: HFConfig) -> Values:
        epsilon = read_typed(hf, "rms_norm_eps", float, None)
        if epsilon is None:
            return {"norm.layernorm_epsilon": read_typed(hf, "layer_norm_eps", float, 1e-5)}
        return {"norm.normalization": "RMSNorm", "norm.layernorm_epsilon": epsilon, "norm.cast_order": "weight_last"}

    def write(self, config: ModelConfig) -> Values:
        epsilon = config.norm.layernorm_epsilon
        if config.norm.normalization == "RMSNorm":
            return {"rms_norm_eps": epsilon}
        return {"rms_norm_eps": None, "layer_norm_eps": epsilon}


class Widths(OwnEntry):
    """`intermediate_size`, of the experts, and `prefix_dense_intermediate_size`, of MLPs; null means the former."""

    names = ("intermediate_size", "prefix_dense_intermediate_size")

    def read(self, hf: HFConfig) -> Values:
        size = read_typed(hf, "intermediate_size", int, REQUIRED)
        dense = read_typed(hf, "prefix_dense_intermediate_size", int, None)
        return {"moe.moe_ffn_hidden_size": size, "mlp.ffn_hidden_size": size if dense is None else dense}

    def write(self, config: ModelConfig) -> Values:
        size = config.moe.moe_ffn_hidden_size if config.moe else config.mlp.ffn_hidden_size
        dense = config.mlp.ffn_hidden_size
        return {"intermediate_size": size, "prefix_dense_intermediate_size": None if dense == size else dense}


class SelectedScores(OwnEntry):
    """`expert_selection_fn`: softmax or sigmoid of the chosen logits; `norm_topk_prob`: the latter by their sum.
    `shared_expert_combination_strategy`: average or sum of the shared expert and the others."""

    names = ("expert_selection_fn", "norm_topk_prob", "shared_expert_combination_strategy")

    def read(self, hf: HFConfig) -> Values:
        defaults = {"expert_selection_fn": ("softmax", "sigmoid")}
        defaults["shared_expert_combination_strategy"] = ("average", "sum")
        found = {name: hf.get(name, allowed[0]) for name, allowed in defaults.items()}
        for name, value in found.items():
            if value not in defaults[name]:
                allowed = ", ".join(defaults[name])
                raise CheckpointError(f"config.json has {name} = {shorten_value(value)}; supported: {allowed}")
        score, strategy = found.values()
        shared = read_typed(hf, "num_shared_experts", int, 0) > 0
        return {
            "moe.router.score": score,
            "moe.router.normalize": score == "sigmoid" and read_typed(hf, "norm_topk_prob", bool, True),
            "moe.output_multiplier": 0.5 if shared and strategy == "average" else 1.0,
        }

    def write(self, config: ModelConfig) -> Values:
        moe = config.moe
        if moe is None:
            return {}
        shared = moe.shared_expert_intermediate_size is not None
        values: Values = {"expert_selection_fn": moe.router.score}
        values |= {"norm_topk_prob": moe.router.normalize} if moe.router.score == "sigmoid" else {}
        strategy = "sum" if moe.output_multiplier == 1.0 else "average"
        return values | ({"shared_expert_combination_strategy": strategy} if shared else {})


COHERE2_MOE = Family(
    model_type="cohere2_moe",
    fields=(
        *decoder_fields(
            max_positions=8192, pad=0, head_dim=128, tied=True, without=("intermediate_size", "rms_norm_eps")
        ),
        *COHERE_COMMON,
        NormKind(),
        Widths(),
        LayerKinds(0),
        RotatedPrefix(),
        *expert_sizes("num_experts", 8, 2),
        SharedExpertCount("num_shared_experts", 0, size="intermediate_size"),
        Fixed("moe.router.score_after_topk", True),
        SelectedScores(),
        Rope(),
    ),
    names=Names(norms=("input_layernorm", None, None, None)),
    other_names=(Names(form="fused", norms=("input_layernorm", None, None, None), experts=Fused()),),
)
