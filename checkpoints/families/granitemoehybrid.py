"""granitemoehybrid: granite's multipliers, Mamba-2 in most layers, attention mostly without positions, experts beside a
shared MLP or that MLP alone (Granite 4)."""

from dataclasses import dataclass, replace
from typing import Any

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import ATTENTION_BIAS, SILU, decoder_fields
from .base.family import Family
from .base.fields import HFConfig, OwnEntry, Values, read_typed, shorten_value
from .base.moe_fields import RouterLoss
from .base.recurrent import Mamba2Names, MixerField, Nested, RecurrentLayers, TimeStepLimit
from .granite import MULTIPLIERS
from .granitemoe import FORM, OTHER_FORMS


class OptionalExperts(OwnEntry):
    """`num_local_experts`: 0 means the shared MLP alone, which is then the layer's."""

    names = (
        "intermediate_size",
        "num_local_experts",
        "num_experts_per_tok",
        "shared_intermediate_size",
        *RouterLoss().names,
    )

    def read(self, hf: HFConfig) -> Values:
        shared, experts = (
            read_typed(hf, "shared_intermediate_size", int, 1024),
            read_typed(hf, "num_local_experts", int, 8),
        )
        if not experts:
            return {"mlp.ffn_hidden_size": shared}
        size = read_typed(hf, "intermediate_size", int, 11008)
        return {
            "mlp.ffn_hidden_size": size,
            "moe.moe_ffn_hidden_size": size,
            "moe.num_moe_experts": experts,
            "moe.moe_router_topk": read_typed(hf, "num_experts_per_tok", int, 2),
            "moe.shared_expert_intermediate_size": shared,
            "moe.router.score_after_topk": True,
            "moe.router.normalize": False,
            **RouterLoss().read(hf),
        }

    def write(self, config: ModelConfig) -> Values:
        moe = config.moe
        if moe is None:
            return {"num_local_experts": 0, "shared_intermediate_size": config.mlp.ffn_hidden_size}
        return {
            "intermediate_size": moe.moe_ffn_hidden_size,
            "num_local_experts": moe.num_moe_experts,
            "num_experts_per_tok": moe.moe_router_topk,
            "shared_intermediate_size": moe.shared_expert_intermediate_size,
            **RouterLoss().write(config),
        }


class Positions(OwnEntry):
    """`position_embedding_type`: "rope", or null for none."""

    names = ("position_embedding_type",)

    def read(self, hf: HFConfig) -> Values:
        kind = hf.get("position_embedding_type")
        if kind not in (None, "rope", "nope"):
            raise CheckpointError(
                f"config.json has position_embedding_type = {shorten_value(kind)}; supported: null, 'rope', 'nope'"
            )
        return {"embedding.position_embedding_type": "rope" if kind == "rope" else "none"}

    def write(self, config: ModelConfig) -> Values:
        return {"position_embedding_type": "rope" if config.embedding.position_embedding_type == "rope" else None}


@dataclass(frozen=True)
class MambaHeadDim(MixerField):
    """`mamba_d_head`: "auto", or what `mamba_expand` times hidden_size and the heads say, too."""

    hf: str = "mamba_d_head"
    name: str = "head_dim"
    kind: type = int
    default: Any = "auto"

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        heads = read_typed(hf, "mamba_n_heads", int, 128)
        size = read_typed(hf, "mamba_expand", int, 2) * nested["hidden_size"]
        value = hf.get(self.hf, "auto")
        if heads < 1 or size % heads or value not in ("auto", size // heads):
            raise CheckpointError(
                f"config.json has mamba_d_head = {shorten_value(value)} and {heads} heads; allowed: 'auto', or "
                f"mamba_expand times hidden_size = {size} by the heads"
            )
        return {"head_dim": size // heads}

    def write(self, mixer: Any, config: ModelConfig) -> Values:
        return {"mamba_d_head": mixer.head_dim, "mamba_expand": mixer.size // config.hidden_size}


MAMBA_PARTS = (
    MixerField("mamba_n_heads", "num_heads", int, 128),
    MambaHeadDim(),
    MixerField("mamba_d_state", "state_size", int, 256),
    MixerField("mamba_n_groups", "num_groups", int, 1),
    MixerField("mamba_d_conv", "conv_kernel_size", int, 4),
    MixerField("mamba_proj_bias", "use_bias", bool, False),
    MixerField("mamba_conv_bias", "use_conv_bias", bool, True),
    TimeStepLimit(),
)
_SHARED_MLP = {"fc1": ("shared_mlp.input_linear",), "fc2": "shared_mlp.output_linear"}
_MIXERS = {"mamba2": Mamba2Names()}

GRANITEMOEHYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    fields=(
        *decoder_fields(max_positions=2048, activations=SILU, without=("intermediate_size",)),
        ATTENTION_BIAS,
        *MULTIPLIERS,
        OptionalExperts(),
        Positions(),
    ),
    mixers=RecurrentLayers(
        kind="mamba2",
        parts=MAMBA_PARTS,
        word=("mamba", "linear_attention"),
        attention=("attention", "full_attention"),
        pattern=lambda hf, layers: hf.get("layers_block_type") or ["mamba"] * layers,
        extra=("layers_block_type", "mamba_expand"),
    ),
    names=replace(FORM, mixers=_MIXERS, **_SHARED_MLP),
    other_names=tuple(replace(form, mixers=_MIXERS, **_SHARED_MLP) for form in OTHER_FORMS),
)
