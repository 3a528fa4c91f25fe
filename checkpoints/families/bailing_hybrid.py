"""bailing_hybrid: the gated delta rule with a bounded decay for each channel, latent attention with a gate for each
head (Ling 3)."""

from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from .base.common import ATTENTION_BIAS, SILU
from .base.delta_names import SeparateDeltaNames
from .base.family import Family
from .base.fields import Fixed, HFConfig, Only, Values, fixed, read_typed, renamed
from .base.latent import QueryRank, latent_fields
from .base.moe_fields import LayerKinds
from .base.names import Fused, Names
from .base.recurrent import MixerField, Nested, RecurrentLayers, every
from .base.rope import Rope
from .base.unused import LAYERS_BEHIND
from .deepseek_v2 import latent_decoder
from .kimi_linear import BY_CHANNEL, DELTA_CHANNELS, DELTA_HEADS, KIMI_SPELLING, TIED, Alike, kimi_experts


@dataclass(frozen=True)
class SafeGate(MixerField):
    """`kda_safe_gate`: the log of the decay lies between `kda_lower_bound` and 0; without it there is no bound."""

    hf: str = "kda_safe_gate"
    name: str = "decay_lower_bound"
    kind: type = bool
    default: Any = True

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        safe = read_typed(hf, self.hf, bool, True)
        return {self.name: read_typed(hf, "kda_lower_bound", float, -5.0) if safe else None}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        bound = mixer.decay_lower_bound
        return {self.hf: bound is not None} | ({} if bound is None else {"kda_lower_bound": bound})


class BothSpellings(Alike):
    """A field that files of transformers' have by one name, others by `older`; both are written."""

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        return dict.fromkeys((self.hf, self.older), getattr(mixer, self.name))


_LATENT = latent_fields(query_rank=None, rope=Rope(theta=6e6))
_FORM = Names(
    embedding="model.word_embeddings",
    gate="attention.g_proj",
    proj="attention.dense",
    selection_bias="mlp.gate.expert_bias",
    mixers={"gated_delta": SeparateDeltaNames("attention.", proj="dense")},
)
_IN_MEMORY = Names(
    form="fused",
    gate="self_attn.g_proj",
    selection_bias="mlp.gate.e_score_correction_bias",
    experts=Fused(),
    mixers={"gated_delta": SeparateDeltaNames(convolution="joined", forget="forget_gate.")},
)

BAILING_HYBRID = Family(
    model_type="bailing_hybrid",
    fields=renamed(
        (
            *latent_decoder(max_positions=262144, pad=156892, activations=SILU, without=TIED),
            *(entry for entry in _LATENT if not isinstance(entry, QueryRank)),
            Only("tie_word_embeddings", False),  # with true, transformers ties nothing
            Only("q_lora_rank", None),
            ATTENTION_BIAS,
            Fixed("rope.style", "interleaved", ("head_dim", "mtp_loss_scaling_factor", "layer_group_size")),
            *fixed({"attention.output_gate": True, "attention.output_gate_by": "head"}),
            *kimi_experts(experts=512, chosen=8, width=768, scale=2.5, groups=(8, 4)),
            LayerKinds(dense=2),
        ),
        KIMI_SPELLING,
    ),
    mixers=RecurrentLayers(
        kind="gated_delta",
        parts=(
            Alike("linear_num_heads", "num_key_heads", int, older="num_attention_heads", others=DELTA_HEADS),
            BothSpellings("linear_head_dim", "key_head_dim", int, 128, DELTA_CHANNELS, "head_dim"),
            BothSpellings("linear_conv_kernel_dim", "conv_kernel_size", int, 4, older="short_conv_kernel_size"),
            SafeGate(),
        ),
        fixed=BY_CHANNEL,
        pattern=every("layer_group_size", 6),
        extra=("kda_lower_bound", "short_conv_kernel_size"),
    ),
    names=_FORM,
    other_names=(_IN_MEMORY,),
    unused=LAYERS_BEHIND,
    keeps_dtype=("*.router.expert_bias", "*.mixer.conv_weight", "*.mixer.dt_bias", "*.mixer.A_log"),
)
