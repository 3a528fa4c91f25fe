"""qwen3_next: gated delta rule in three of four layers, attention with an output gate, norms by 1 + weight, experts
beside a shared one behind a gate (Qwen3-Next)."""

from dataclasses import replace
from typing import Any

from .base.common import ATTENTION_BIAS, SILU, decoder_fields
from .base.family import Family
from .base.fields import Field, Fixed, fixed
from .base.moe_fields import NUM_EXPERTS, RouterLoss, SparseLayers, expert_sizes
from .base.names import Fused, Names
from .base.recurrent import GatedDeltaNames, MixerField, RecurrentLayers, every
from .base.rope import Rope
from .base.unused import CONSTANTS

GATED_BIAS = replace(ATTENTION_BIAS, paths=(*ATTENTION_BIAS.paths, "attention.output_gate_bias"))
"""The gate's rows lie between the rows of q, and have the bias, too."""
GATED_DELTA = RecurrentLayers(
    kind="gated_delta",
    parts=(
        MixerField("linear_num_key_heads", "num_key_heads", int, 16),
        MixerField("linear_num_value_heads", "num_value_heads", int, 32),
        MixerField("linear_key_head_dim", "key_head_dim", int, 128),
        MixerField("linear_value_head_dim", "value_head_dim", int, 128),
        MixerField("linear_conv_kernel_dim", "conv_kernel_size", int, 4),
    ),
    pattern=every("full_attention_interval", 4),
    extra=("full_attention_interval",),
)
SHARED_EXPERT: dict[str, Any] = {
    "shared_fc1": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_fc2": "mlp.shared_expert.down_proj",
}
_FORM = Names(gate_in_q=True, mixers={"gated_delta": GatedDeltaNames(by_key_head=True)}, **SHARED_EXPERT)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    fields=(
        *decoder_fields(max_positions=32768, kv_heads=2, head_dim=256, activations=SILU),
        GATED_BIAS,
        *fixed({"norm.layernorm_zero_centered_gamma": True, "norm.cast_order": "weight_first"}),
        *fixed({"attention.qk_layernorm": "head", "attention.output_gate": True}),
        *expert_sizes(NUM_EXPERTS, 512, 10, width=512, shared=512),
        Fixed("moe.shared_expert_gate", True),
        Field("norm_topk_prob", "moe.router.normalize", bool, True),
        SparseLayers(),
        RouterLoss(),
        Rope(partial=0.25),
    ),
    mixers=GATED_DELTA,
    names=_FORM,
    other_names=(replace(_FORM, form="fused", experts=Fused()),),
    unused=replace(CONSTANTS, patterns=(*CONSTANTS.patterns, "mtp.*")),
)
