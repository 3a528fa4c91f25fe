"""kimi_linear: the gated delta rule with a decay for each channel, latent attention without positions (arXiv
2510.26692)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import ATTENTION_BIAS, SILU
from .base.delta_names import SeparateDeltaNames
from .base.family import Family
from .base.fields import Entry, Fixed, HFConfig, Only, Values, read_typed, renamed, shorten_value
from .base.latent import latent_fields
from .base.moe_fields import ExpertGroups, LayerKinds, SharedExpertCount, expert_sizes, sigmoid_router
from .base.names import Fused, Names, PerExpert
from .base.recurrent import MixerField, Nested, RecurrentLayers
from .deepseek_v2 import latent_decoder

KIMI_SPELLING = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""transformers' names of fields -> those in files."""


def kimi_experts(*, experts: int, chosen: int, width: int, scale: float, groups: tuple[int, int]) -> tuple[Entry, ...]:
    """Return the fields of experts beside a shared one; the arguments are the class's defaults."""
    return (
        *expert_sizes("num_local_experts", experts, chosen, width=width),
        SharedExpertCount("n_shared_experts", 1, default_size=width),
        *sigmoid_router(default_scale=scale),
        ExpertGroups(*groups),
    )


@dataclass(frozen=True)
class Alike(MixerField):
    """A field of config.json that says several fields of a mixer: its value is `name`'s and that of `others`. older: of
    another field where this one is absent, by name."""

    others: tuple[str, ...] = ()
    older: str = ""

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        hf = hf if self.hf in hf or self.older not in hf else {**hf, self.hf: hf[self.older]}
        return dict.fromkeys((self.name, *self.others), read_typed(hf, self.hf, self.kind, self.default))


DELTA_HEADS = ("num_value_heads",)
DELTA_CHANNELS = ("value_head_dim",)
LATENTS = ("decay_lora_rank", "gate_lora_rank")
BY_CHANNEL: dict[str, Any] = {"decay_by": "channel", "gate_activation": "sigmoid"}


class KimiLayers(RecurrentLayers):
    """`linear_attn_config`: sizes of the delta rule, and the numbers, from 1, of the layers with it and with attention;
    transformers' own files have its values outside, and `layer_types`; these win over the numbers."""

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        inner = hf.get("linear_attn_config", {})
        if not isinstance(inner, dict):
            raise CheckpointError(f"config.json has linear_attn_config = {shorten_value(inner)}, which is no object")
        outer = {theirs: inner[name] for name, theirs in _INNER.items() if name in inner}
        if hf.get("layer_types") is None and {"full_attn_layers", "kda_layers"} <= inner.keys():
            outer["layer_types"] = _of_numbers(inner, nested["num_layers"])
        return super().read({**hf, **outer}, nested)

    def write(self, config: ModelConfig) -> Values:
        values = super().write(config)
        kinds = values["layer_types"]
        inner = {name: values[theirs] for name, theirs in _INNER.items() if theirs in values}
        for name, word in (("full_attn_layers", self.attention), ("kda_layers", self.word)):
            inner[name] = [i for i, kind in enumerate(kinds, 1) if kind in word]
        return {"linear_attn_config": inner}


_INNER = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}


def _of_numbers(inner: Mapping[str, Any], layers: int) -> list[str]:
    attends, others = (read_typed(inner, name, list, []) for name in ("full_attn_layers", "kda_layers"))
    if sorted([*attends, *others], key=str) != sorted(range(1, layers + 1), key=str):
        raise CheckpointError(
            f"config.json has full_attn_layers = {shorten_value(attends)} and kda_layers = {shorten_value(others)}; "
            f"allowed: each number from 1 to {layers} once"
        )
    return ["full_attention" if number in attends else "linear_attention" for number in range(1, layers + 1)]


def _pattern(hf: HFConfig, layers: int) -> list[str]:
    return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]


TIED = ("tie_word_embeddings",)
_WITHOUT_EFFECT = ("rope_theta", "rope_scaling", "rope_parameters", "head_dim")
_MOE = "block_sparse_moe."
_FORM = Names(
    router=f"{_MOE}gate",
    selection_bias=f"{_MOE}gate.e_score_correction_bias",
    experts=PerExpert(*(f"{_MOE}experts.{{e}}.{name}" for name in ("w1", "w3", "w2"))),
    shared_fc1=(f"{_MOE}shared_experts.gate_proj", f"{_MOE}shared_experts.up_proj"),
    shared_fc2=f"{_MOE}shared_experts.down_proj",
    mixers={"gated_delta": SeparateDeltaNames(decay_dims=(0, 1, 3))},
)
_IN_MEMORY = SeparateDeltaNames(convolution="joined", forget="forget_gate.", decay_dims=(0, 1, 3))

KIMI_LINEAR = Family(
    model_type="kimi_linear",
    fields=renamed(
        (
            *latent_decoder(max_positions=1048576, norm_eps=1e-5, pad=163839, activations=SILU, without=TIED),
            Only("tie_word_embeddings", False),  # with true, transformers ties nothing
            *latent_fields(query_rank=None, rope=None),
            ATTENTION_BIAS,
            Fixed("embedding.position_embedding_type", "none", _WITHOUT_EFFECT),
            Only("mla_use_nope", True),
            *kimi_experts(experts=256, chosen=8, width=1024, scale=2.446, groups=(1, 1)),
            LayerKinds(),
            Only("moe_router_activation_func", "sigmoid"),
            Only("use_grouped_topk", True),
        ),
        KIMI_SPELLING,
    ),
    mixers=KimiLayers(
        kind="gated_delta",
        parts=(
            Alike("linear_num_heads", "num_key_heads", int, 32, DELTA_HEADS),
            Alike("linear_head_dim", "key_head_dim", int, 128, (*DELTA_CHANNELS, *LATENTS)),
            MixerField("linear_conv_kernel_dim", "conv_kernel_size", int, 4),
        ),
        fixed=BY_CHANNEL,
        pattern=_pattern,
        extra=("linear_attn_config",),
    ),
    names=_FORM,
    other_names=(
        replace(
            Names(selection_bias="mlp.gate.e_score_correction_bias"),
            form="fused",
            experts=Fused(),
            mixers={"gated_delta": _IN_MEMORY},
        ),
        replace(  # what transformers writes: it renames dense MLPs, too
            _FORM, form="saved", fc1=(f"{_MOE}gate_proj", f"{_MOE}up_proj"), fc2=f"{_MOE}down_proj"
        ),
    ),
)
