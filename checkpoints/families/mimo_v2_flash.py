"""mimo_v2_flash: windowed layers have sinks and twice the key heads of full ones, values are scaled and narrower than
keys, a third of each head is rotated, DeepSeek-V3's router without a shared expert."""

from dataclasses import replace

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.attentions import Nested, SlidingAttention
from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed, HFConfig, Nullable, OneOf, OwnEntry, Values, fixed, read_typed, shorten_value
from .base.layer_fields import LayerPattern
from .base.moe_fields import ROUTED_EXPERTS, ExpertGroups, LayerKinds, expert_sizes
from .base.names import Fused, Names
from .base.rope import RopePerLayerType
from .base.unused import Unused

_PARTIAL = 0.334
"""The rotated part of each head."""
_LAYERS = LayerPattern(window=129, period=6, full=lambda layer, _: layer == 0 or layer % 6 == 5)


class Agrees(OwnEntry):
    """Fields of the published file about windowed layers; here they follow from others; others are refused."""

    names = (
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
        "swa_head_dim",
        "swa_v_head_dim",
        "add_swa_attention_sink_bias",
        "add_full_attention_sink_bias",
        "attention_chunk_size",
        "partial_rotary_factor",
    )

    def read(self, hf: HFConfig) -> Values:
        defaults = (("num_attention_heads", 64), ("num_key_value_heads", 4), ("head_dim", 192), ("v_head_dim", 128))
        heads, groups, head, value = (read_typed(hf, name, int, default) for name, default in defaults)
        window = read_typed(hf, "sliding_window_size", int, None)
        for name, wanted in zip(self.names, (heads, 2 * groups, head, value, True, False, window, _PARTIAL)):
            if hf.get(name, wanted) not in (None, wanted):
                raise CheckpointError(f"config.json has {name} = {shorten_value(hf[name])}; supported: {wanted}")
        return {}


class PublishedSpelling(OwnEntry):
    """The fields of the published file, as transformers fills them in from its fields: `hybrid_layer_pattern` and
    `moe_layer_freq` with a 1 for windowed layers and for those with experts, `sliding_window_size` without the query's
    own position."""

    names = (*_LAYERS.names, "sliding_window_size", "hybrid_layer_pattern", "moe_layer_freq")

    def read(self, hf: HFConfig) -> Values:
        kinds = read_typed(hf, "hybrid_layer_pattern", list, None)
        if kinds is not None and hf.get("layer_types") is None:
            hf = {**hf, "layer_types": ["sliding_attention" if kind == 1 else "full_attention" for kind in kinds]}
        before = read_typed(hf, "sliding_window_size", int, None)
        found = _LAYERS.read(hf if before is None else {**hf, "sliding_window": before + 1})
        experts = read_typed(hf, "moe_layer_freq", list, None)
        if experts is not None and hf.get("mlp_layer_types") is None:
            found["moe.layers"] = [i for i, has in enumerate(experts) if has == 1]
        return found

    def write(self, config: ModelConfig) -> Values:
        return _LAYERS.write(config)


def _windowed(attention: Nested) -> Values:
    return {"num_query_groups": 2 * attention["num_query_groups"], "sinks": True}


_FORM = Names(sinks="self_attn.attention_sink_bias", selection_bias="mlp.gate.e_score_correction_bias")

MIMO_V2_FLASH = Family(
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    fields=(
        *decoder_fields(max_positions=131072, kv_heads=4, head_dim=192, without=("rms_norm_eps",)),
        OneOf(("rms_norm_eps", "layernorm_epsilon"), "norm.layernorm_epsilon", float, 1e-5),
        Field("attention_bias", "attention.add_qkv_bias", bool, False),
        Field("v_head_dim", "attention.v_head_dim", int, 128),
        Nullable("attention_value_scale", "attention.value_scale", 0.707),
        *expert_sizes(ROUTED_EXPERTS, 256, 8, width=2048),
        LayerKinds(),
        *fixed({"moe.router.score": "sigmoid", "moe.router.expert_bias": True, "moe.router.normalize_eps": 1e-20}),
        Fixed("moe.router.dtype", "float32"),
        Field("norm_topk_prob", "moe.router.normalize", bool, True),
        Field("routed_scaling_factor", "moe.router.scaling_factor", float, 1.0, null=True),
        ExpertGroups(),
        PublishedSpelling(),
        Agrees(),
        RopePerLayerType(5e6, 1e4, local="swa_rope_theta", partial=_PARTIAL, default=(_PARTIAL, _PARTIAL)),
    ),
    mixers=SlidingAttention(_windowed),
    names=_FORM,
    other_names=(replace(_FORM, form="fused", experts=Fused(), sinks="self_attn.sinks"),),
    unused=Unused(("*.rotary_emb.inv_freq", "model.mtp.*")),
)
