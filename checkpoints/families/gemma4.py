"""gemma4_text: layers that see everything have other heads, whose keys are values; keys of earlier layers, embeddings
of each layer, experts beside the MLP, a stored factor of each layer; gemma4 holds one beside others that see and hear.
"""

from dataclasses import replace
from typing import Any

from te_models.config import AttentionConfig, ModelConfig

from ..io.errors import CheckpointError
from .base.additions import PerLayerEmbeddingSizes, shared_layers, shared_sources
from .base.attentions import Nested, mixers
from .base.common import ATTENTION_BIAS
from .base.family import Family
from .base.fields import REQUIRED, Fixed, HFConfig, Nullable, OwnEntry, Values, fixed, read_typed, shorten_value
from .base.layer_fields import LayerPattern
from .base.names import SANDWICH, Fused, Names, per_expert
from .base.rope import RopePerLayerType
from .base.text_part import TextPart, with_images
from .base.unused import Unused
from .gemma import gemma_fields

GEMMA_FIXED = (
    *fixed({"norm.cast_order": "weight_first", "embedding.multiplier": "sqrt_hidden_in_weight_dtype"}),
    *fixed({"block": "sandwich", "attention.softmax_scale": 1.0, "attention.qk_layernorm": "head"}),
    Fixed("attention.value_layernorm", True),
    ATTENTION_BIAS,
)
"""What gemma3n and gemma4 have in common."""

_OVERRIDES = ("head_dim", "num_key_value_heads")


class LastLayerFull(LayerPattern):
    """`layer_types`, of which transformers makes the last one full."""

    def read(self, hf: HFConfig) -> Values:
        values = super().read(hf)
        values["layer_types"][-1] = "full"
        return values


class ExpertsBesideMLP(OwnEntry):
    """`enable_moe_block`: experts beside the MLP of every layer; and the widths of the MLPs: `use_double_wide_mlp`
    doubles the width in layers that read another layer's keys."""

    names = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size", "use_double_wide_mlp")

    def read(self, hf: HFConfig) -> Values:
        layers, width = (
            read_typed(hf, "num_hidden_layers", int, REQUIRED),
            read_typed(hf, "intermediate_size", int, REQUIRED),
        )
        shared = read_typed(hf, "num_kv_shared_layers", int, 0)
        experts = read_typed(hf, "enable_moe_block", bool, False)
        doubled = read_typed(hf, "use_double_wide_mlp", bool, False) and 0 < shared < layers
        if doubled and experts:
            raise CheckpointError("config.json has use_double_wide_mlp with enable_moe_block; supported: one of them")
        if doubled:
            return {"ffn_hidden_sizes": [width] * (layers - shared) + [2 * width] * shared}
        if not experts:
            return {}
        return {
            "moe.num_moe_experts": read_typed(hf, "num_experts", int, REQUIRED),
            "moe.moe_router_topk": read_typed(hf, "top_k_experts", int, REQUIRED),
            "moe.moe_ffn_hidden_size": read_typed(hf, "moe_intermediate_size", int, REQUIRED),
            "moe.shared_expert_intermediate_size": width,
            "moe.own_norms": True,
            "moe.router.normed_input": True,
            "moe.router.expert_scale": True,
        }

    def write(self, config: ModelConfig) -> Values:
        moe, doubled = config.moe, config.ffn_hidden_sizes is not None
        values: Values = {"enable_moe_block": moe is not None, "use_double_wide_mlp": doubled}
        if moe is not None:
            values |= {"num_experts": moe.num_moe_experts, "top_k_experts": moe.moe_router_topk}
            values["moe_intermediate_size"] = moe.moe_ffn_hidden_size
        return values


class FullAttention(OwnEntry):
    """Layers that see everything: `global_head_dim` channels of a head, with `attention_k_eq_v` one projection for keys
    and values, and `num_global_key_value_heads`; or `per_layer_config`, as transformers writes it, with both for each
    of these layers. And `num_kv_shared_layers`."""

    names = (
        "global_head_dim",
        "num_global_key_value_heads",
        "attention_k_eq_v",
        "per_layer_config",
        "num_kv_shared_layers",
    )

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        kinds, same = nested["layer_types"], read_typed(hf, "attention_k_eq_v", bool, False)
        full = [i for i, kind in enumerate(kinds) if kind == "full"]
        size = read_typed(hf, "global_head_dim", int, 512)
        groups = read_typed(hf, "num_global_key_value_heads", int, None) if same else None
        by_layer = hf.get("per_layer_config")
        if by_layer is not None:
            size, groups = self._overrides(by_layer, full, nested["attention"])
        change: Values = {"kv_channels": size, "key_is_value": same, "window_size": None}
        change |= {} if groups is None else {"num_query_groups": groups}
        sources = shared_sources(hf, kinds, 0)
        found = mixers(nested, ["full" if kind == "full" else "attention" for kind in kinds], {"full": change})
        return found | ({} if sources is None else {"kv_source_layers": sources})

    @staticmethod
    def _overrides(by_layer: Any, full: list[int], attention: Nested) -> tuple[int, int]:
        """Return what all of these layers have in place of `head_dim` and `num_key_value_heads`."""
        wanted = {str(layer) for layer in full}
        alike = isinstance(by_layer, dict) and {str(layer) for layer in by_layer} == wanted
        values = list(by_layer.values()) if alike else []
        alike = alike and all(isinstance(v, dict) and set(v) <= set(_OVERRIDES) and v == values[0] for v in values)
        if not alike:
            raise CheckpointError(
                f"config.json has per_layer_config = {shorten_value(by_layer)}; supported: the same "
                f"{_OVERRIDES[0]} and {_OVERRIDES[1]} for each full_attention layer, and nothing for others"
            )
        usual = {"head_dim": attention["kv_channels"], "num_key_value_heads": attention["num_query_groups"]}
        size, groups = (read_typed(values[0], name, int, usual[name]) for name in _OVERRIDES)
        return size, groups

    def write(self, config: ModelConfig) -> Values:
        full = (config.mixers or {}).get("full", config.attention)
        assert isinstance(full, AttentionConfig)
        values: Values = {"num_kv_shared_layers": shared_layers(config), "attention_k_eq_v": full.key_is_value}
        values["global_head_dim"] = full.kv_channels
        if full.key_is_value:
            values["num_global_key_value_heads"] = full.num_query_groups
        return values


_NAMES = Names(
    norms=SANDWICH,
    router="router.proj",
    experts=Fused("experts.gate_up_proj", "experts.down_proj"),
    shared_fc1=("mlp.gate_proj", "mlp.up_proj"),
    shared_fc2="mlp.down_proj",
)

GEMMA4_TEXT = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    fields=(
        *gemma_fields(max_positions=131072),
        *GEMMA_FIXED,
        Fixed("layer_scalar", True),
        LastLayerFull(window=512, period=6),
        Nullable("final_logit_softcapping", "embedding.logits_softcap", None),
        ExpertsBesideMLP(),
        PerLayerEmbeddingSizes(),
        RopePerLayerType(theta=1e6, sliding_theta=1e4, older=False, proportional=0.25),
    ),
    mixers=FullAttention(),
    names=_NAMES,
    other_names=(per_expert(_NAMES, "experts"),),
    unused=Unused(shared_keys=True),
)

_SIZES = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
HEARING = ("audio_tower.*", "embed_vision.*", "embed_audio.*")
"""Models beside a text model that its families of images do not have."""


def with_sight_and_hearing(family: Family) -> Family:
    """Return a family whose models also hear."""
    unused = family.unused
    beside = (*unused.beside, *HEARING, *(f"model.{name}" for name in HEARING))
    return replace(family, unused=replace(unused, beside=beside, shared_keys=True))


GEMMA4 = with_sight_and_hearing(
    with_images("gemma4", "Gemma4ForConditionalGeneration", TextPart((GEMMA4_TEXT,), _SIZES), prefix=None)
)
