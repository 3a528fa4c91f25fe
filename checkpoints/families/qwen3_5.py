"""qwen3_5_text and qwen3_5_moe_text: the layers of qwen3_next, with dense MLPs or with experts in all layers, and
projections of the gated delta rule apart; qwen3_5 and qwen3_5_moe hold one beside a model that sees images."""

from dataclasses import replace

from .base.common import SILU, decoder_fields
from .base.family import Family
from .base.fields import Entry, fixed
from .base.moe_fields import NUM_EXPERTS, ExpertSize, RouterLoss, expert_sizes
from .base.names import Fused, Names
from .base.recurrent import GatedDeltaNames
from .base.rope import Rope
from .base.text_part import TextPart
from .base.unused import CONSTANTS, Unused
from .qwen3_next import GATED_BIAS, GATED_DELTA, SHARED_EXPERT

_MIXERS = {"gated_delta": GatedDeltaNames()}
_COMMON: tuple[Entry, ...] = (
    GATED_BIAS,
    *fixed({"norm.layernorm_zero_centered_gamma": True, "norm.cast_order": "weight_first"}),
    *fixed({"attention.qk_layernorm": "head", "attention.output_gate": True}),
    # three positions of a token, all the same in text
    Rope(partial=0.25, extra=("mrope_section", "mrope_interleaved")),
)
_UNUSED = Unused((*CONSTANTS.patterns, "mtp.*"))
_DENSE = Names(gate_in_q=True, mixers=_MIXERS)
_MOE = Names(gate_in_q=True, mixers=_MIXERS, **SHARED_EXPERT)

QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields=(*decoder_fields(max_positions=32768, kv_heads=4, head_dim=256, activations=SILU), *_COMMON),
    mixers=GATED_DELTA,
    names=_DENSE,
    unused=_UNUSED,
)
QWEN3_5_MOE_TEXT = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields=(
        *decoder_fields(
            max_positions=32768, kv_heads=2, head_dim=256, activations=SILU, without=("intermediate_size",)
        ),
        *_COMMON,
        ExpertSize(name="moe_intermediate_size", default=512, dense=True),
        *expert_sizes(NUM_EXPERTS, 256, 8, shared=512),
        *fixed({"moe.shared_expert_gate": True, "moe.router.normalize": True}),
        RouterLoss(),
    ),
    mixers=GATED_DELTA,
    names=_MOE,
    other_names=(replace(_MOE, form="fused", experts=Fused()),),
    unused=_UNUSED,
)


def _beside_images(model_type: str, architecture: str, text: Family) -> Family:
    at = "model.language_model"
    moved = {"embedding": f"{at}.embed_tokens", "final_norm": f"{at}.norm", "layer": f"{at}.layers.{{i}}"}
    names, *others = (replace(form, **moved) for form in (text.names, *text.other_names))
    return Family(
        model_type=model_type,
        architecture=architecture,
        fields=(TextPart((text,)),),
        names=names,
        other_names=tuple(others),
        unused=replace(_UNUSED, beside=("model.visual.*",)),
    )


QWEN3_5 = _beside_images("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN3_5_TEXT)
QWEN3_5_MOE = _beside_images("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE_TEXT)
