"""nemotron_h: every layer is one sublayer, of Mamba-2, attention without positions, an MLP or experts with squared ReLU
(arXiv 2504.03624)."""

from dataclasses import replace

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed, HFConfig, Only, OwnEntry, Values, fixed, shorten_value
from .base.moe_fields import ExpertEntries, ExpertGroups, expert_sizes, sigmoid_router
from .base.names import Fused, Names, PerExpert
from .base.recurrent import Mamba2Names, MixerField, Nested, RecurrentLayers

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_MAMBA = RecurrentLayers(
    kind="mamba2",
    parts=(
        MixerField("mamba_num_heads", "num_heads", int, 128),
        MixerField("mamba_head_dim", "head_dim", int, 64),
        MixerField("ssm_state_size", "state_size", int, 128),
        MixerField("n_groups", "num_groups", int, 8),
        MixerField("conv_kernel", "conv_kernel_size", int, 4),
        MixerField("use_bias", "use_bias", bool, False),
        MixerField("use_conv_bias", "use_conv_bias", bool, True),
        MixerField("time_step_min", "time_step_low", float, 1e-3),
    ),
)


_ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
"""Older names of fields; these win."""


class Blocks(OwnEntry):
    """`layers_block_type`, or `hybrid_override_pattern` of a letter for each layer: what each layer is."""

    names = ("layers_block_type", "layer_types", "hybrid_override_pattern", *_ALIASES, *_MAMBA.names)

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        words = _words(hf)
        if words is None:
            found = hf.get("layers_block_type", hf.get("layer_types", hf.get("hybrid_override_pattern")))
            raise CheckpointError(
                f"config.json has layers_block_type = {shorten_value(found)}; allowed for each layer: "
                f"{', '.join(map(repr, _LETTERS.values()))}"
            )
        mixers = {"linear_attention": "mamba2", "full_attention": "attention"}
        found: Values = {
            "layer_mixers": [mixers.get(word, "none") for word in words],
            "mlp_layers": [i for i, word in enumerate(words) if word in ("mlp", "moe")],
        }
        if "linear_attention" in words:
            renamed = {new: hf[old] for old, new in _ALIASES.items() if old in hf}
            found["mixers"] = {"mamba2": _MAMBA.mixer({**hf, **renamed}, nested)}
        moe = [i for i, word in enumerate(words) if word == "moe"]
        return found | {"moe": nested["moe"] | {"layers": moe} if moe else None}

    def write(self, config: ModelConfig) -> Values:
        words = []
        for i in range(config.num_layers):
            mlp = "moe" if config.is_moe_layer(i) else "mlp"
            attends = "full_attention" if config.attention_of(i) else mlp
            words.append("linear_attention" if config.mixer_of(i) else attends)
        return {"layers_block_type": words} | {n: v for n, v in _MAMBA.write(config).items() if n != "layer_types"}


def _words(hf: HFConfig) -> list[str] | None:
    words, pattern = hf.get("layers_block_type", hf.get("layer_types")), hf.get("hybrid_override_pattern")
    if words is None and pattern is None:
        words = ["linear_attention", "moe", "full_attention", "mlp"]
    elif words is None and isinstance(pattern, str):
        words = [_LETTERS.get(letter, "") for letter in pattern]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    words = [_OLDER.get(word, word) for word in words]
    return words if words and set(words) <= set(_LETTERS.values()) else None


class LayerLetters(OwnEntry):
    """As many as `layers_block_type` has, whatever `num_hidden_layers` says; both are written."""

    names = ("num_hidden_layers",)

    def read(self, hf: HFConfig) -> Values:
        return {"num_layers": len(_words(hf) or ()) or 1}

    def write(self, config: ModelConfig) -> Values:
        return {"num_hidden_layers": config.num_layers}


_WITHOUT_EFFECT = ("residual_in_fp32", "expand", "n_shared_experts", "mamba_proj_bias", "time_step_limit")
"""Fields that the class has and its layers do not read: a step is `time_step_min` at least, and has no upper bound."""
_FORM = Names(
    embedding="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{i}",
    norms=("norm", None, "norm", None),
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    proj="mixer.o_proj",
    fc1=("mixer.up_proj",),
    fc2="mixer.down_proj",
    router="mixer.gate",
    selection_bias="mixer.gate.e_score_correction_bias",
    experts=PerExpert("", "mixer.experts.{e}.up_proj", "mixer.experts.{e}.down_proj"),
    shared_fc1=("mixer.shared_experts.up_proj",),
    shared_fc2="mixer.shared_experts.down_proj",
    latent="mixer.",
    mixers={"mamba2": Mamba2Names("mixer.")},
)

NEMOTRON_H = Family(
    model_type="nemotron_h",
    fields=(
        *decoder_fields(
            max_positions=4096,
            norm_eps=1e-5,
            norm_name="layer_norm_epsilon",
            kv_heads=8,
            head_dim=128,
            activation="relu2",
            activation_name="mlp_hidden_act",
            without=("num_hidden_layers", "tie_word_embeddings", "pad_token_id"),
        ),
        LayerLetters(),
        Only("tie_word_embeddings", False),  # with true, transformers ties nothing
        Fixed("embedding.position_embedding_type", "none", _WITHOUT_EFFECT),
        *fixed({"norm.cast_order": "weight_first", "mlp.gated": False}),
        Field("mlp_bias", "mlp.bias", bool, False),
        Only("mamba_hidden_act", "silu"),
        ExpertGroups(),
        ExpertEntries(
            (
                *expert_sizes("n_routed_experts", 8, 2, width=7688),
                Field("moe_latent_size", "moe.moe_latent_size", int, None),
                Field("moe_shared_expert_intermediate_size", "moe.shared_expert_intermediate_size", int, 7688),
                *sigmoid_router(),
            )
        ),
    ),
    mixers=Blocks(),
    names=_FORM,
    other_names=(
        replace(
            _FORM,
            form="in-memory",
            embedding="model.embeddings",
            final_norm="model.norm_f",
            layer="model.layers.{i}",
            experts=Fused("mixer.experts.up_proj", "mixer.experts.down_proj"),
        ),
    ),
)
