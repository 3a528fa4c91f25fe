"""llama4_text: chunked attention with L2 norms of q and k, every fourth layer without position encoding, experts that
take their input times a sigmoid, beside a shared expert; llama4 holds one beside a model that sees images."""

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import ATTENTION_BIAS, decoder_fields
from .base.family import Family
from .base.fields import REQUIRED, Fixed, HFConfig, OwnEntry, Values, fixed, read_typed, switch
from .base.layer_fields import check_names, layer_type, read_rotating
from .base.moe_fields import ExpertEntries, ExpertSize, expert_sizes
from .base.names import Fused, Names, per_expert
from .base.rope import Rope
from .base.text_part import TextPart, with_images

_KINDS = ("chunked_attention", "full_attention")


class Layers(OwnEntry):
    """Which layers rotate, `no_rope_layers`, and which see only their chunk, `layer_types`: by default the same."""

    names = ("no_rope_layers", "no_rope_layer_interval", "layer_types", "attention_chunk_size")

    def read(self, hf: HFConfig) -> Values:
        rotating = read_rotating(hf)
        kinds = read_typed(hf, "layer_types", list, None)
        if kinds is None:
            kinds = [_KINDS[0] if rotates else _KINDS[1] for rotates in rotating]
        if len(kinds) != len(rotating):
            raise CheckpointError(f"config.json has {len(kinds)} layer_types and {len(rotating)} no_rope_layers")
        pairs = list(zip(rotating, check_names(kinds, "layer type", _KINDS)))
        if hf.get("attention_chunk_size", 8192) is None:
            # Llama Guard 4: one chunk of any length. transformers 5.17 makes a mask of chunks all the same, and fails.
            return {"layer_types": [layer_type("full", rotates) for rotates in rotating]}
        return {
            "layer_types": [layer_type(kind.removesuffix("_attention"), rotates) for rotates, kind in pairs],
            "attention.chunk_size": read_typed(hf, "attention_chunk_size", int, 8192),
        }

    def write(self, config: ModelConfig) -> Values:
        layers = range(config.num_layers)
        return {
            "no_rope_layers": [int(config.rotates(i)) for i in layers],
            "layer_types": [_KINDS[0] if config.chunk_size(i) else _KINDS[1] for i in layers],
            "attention_chunk_size": config.attention.chunk_size,
        }


class Tuning(OwnEntry):
    """`attn_temperature_tuning`: queries of layers without position encoding grow with the logarithm of position.

    In the first files of Scout it is 4; the code of that time took that for true."""

    names = ("attn_temperature_tuning", "floor_scale", "attn_scale")

    def read(self, hf: HFConfig) -> Values:
        tuned = hf.get("attn_temperature_tuning")
        if not (tuned if type(tuned) is int else read_typed(hf, "attn_temperature_tuning", bool, True)):
            return {}
        at = "attention.temperature_tuning"
        return {
            f"{at}.floor_scale": read_typed(hf, "floor_scale", float, 8192.0),
            f"{at}.attn_scale": read_typed(hf, "attn_scale", float, 0.1),
            f"{at}.position_offset": 1,
            f"{at}.layers": "nope",
        }

    def write(self, config: ModelConfig) -> Values:
        tuning = config.attention.temperature_tuning
        if tuning is None:
            return {"attn_temperature_tuning": False}
        scale = tuning.floor_scale
        return {
            "attn_temperature_tuning": True,
            "floor_scale": int(scale) if scale.is_integer() else scale,
            "attn_scale": tuning.attn_scale,
        }


class MLPWidths(OwnEntry):
    """`intermediate_size_mlp` is the width of dense layers, `intermediate_size` the width of the experts."""

    names = ("intermediate_size", "intermediate_size_mlp")

    def read(self, hf: HFConfig) -> Values:
        return {"mlp.ffn_hidden_size": read_typed(hf, "intermediate_size_mlp", int, 16384)}

    def write(self, config: ModelConfig) -> Values:
        dense = config.mlp.ffn_hidden_size
        experts = dense if config.moe is None else config.moe.moe_ffn_hidden_size
        return {"intermediate_size": experts, "intermediate_size_mlp": dense}


class Mixture(ExpertEntries):
    """What experts need, in a model that has some. Dense ones (MobileLLM-R1, Llama Guard 4) have no `moe_layers`, and
    mostly zero experts of which zero are used; what else they say of experts means nothing."""

    def read(self, hf: HFConfig) -> Values:
        return super().read(hf) if MoELayers().read(hf)["moe.layers"] else {}

    def write(self, config: ModelConfig) -> Values:
        without = {"moe_layers": [], "num_local_experts": 0, "num_experts_per_tok": 0}
        return without if config.moe is None else super().write(config)


class MoELayers(OwnEntry):
    """`moe_layers`; without it every `interleave_moe_layer_step`-th layer has experts."""

    names = ("moe_layers", "interleave_moe_layer_step")

    def read(self, hf: HFConfig) -> Values:
        layers = read_typed(hf, "moe_layers", list, None)
        if layers is not None:
            return {"moe.layers": layers}
        step = read_typed(hf, "interleave_moe_layer_step", int, 1)
        if step < 1:
            raise CheckpointError(
                f"config.json has interleave_moe_layer_step = {step} and no moe_layers; allowed: a positive step"
            )
        return {"moe.layers": list(range(step - 1, read_typed(hf, "num_hidden_layers", int, REQUIRED), step))}

    def write(self, config: ModelConfig) -> Values:
        return {"moe_layers": [i for i in range(config.num_layers) if config.is_moe_layer(i)]}


_FORM = Names(
    fc1=("feed_forward.gate_proj", "feed_forward.up_proj"),
    fc2="feed_forward.down_proj",
    router="feed_forward.router",
    experts=Fused("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", transposed=True),
    shared_fc1=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_fc2="feed_forward.shared_expert.down_proj",
)

_MIXTURE = (
    MoELayers(),
    ExpertSize(shared=True),
    *expert_sizes("num_local_experts", 16, 1),
    *fixed({"moe.router.score": "sigmoid", "moe.router.score_after_topk": True, "moe.router.normalize": False}),
    Fixed("moe.router.apply_on_input", True),
    # transformers has the fields of a router loss and computes none
    Fixed("moe.aux_loss_coeff", 0.0, ("router_aux_loss_coef", "output_router_logits")),
)

LLAMA4_TEXT = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    fields=(
        *(
            e
            for e in decoder_fields(max_positions=131072, norm_eps=1e-5, kv_heads=8, head_dim=128)
            if e.names != ("intermediate_size",)
        ),
        MLPWidths(),
        ATTENTION_BIAS,
        switch("use_qk_norm", "attention.qk_layernorm", "l2", "none", True),  # of layers that rotate
        Layers(),
        Tuning(),
        Mixture(_MIXTURE),
        Fixed("rope.style", "interleaved"),
        Rope(theta=5e5),
    ),
    names=_FORM,
    other_names=(per_expert(_FORM, "feed_forward.experts"),),
)

LLAMA4 = with_images(
    "llama4", "Llama4ForConditionalGeneration", TextPart((LLAMA4_TEXT,), tied_outside=False), in_memory=False
)
