"""minimax_m2: norms over all of q and of k, half of each head rotated, a sigmoid router with a bias.

Published files say `rotary_dim`, and transformers 5.17 ignores it: it rotates the whole head, and is wrong there. Here
`rotary_dim` divided by the head size is the rotated fraction; `partial_rotary_factor` in `rope_parameters` wins.
"""

from dataclasses import dataclass, replace

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Fixed, HFConfig, Only, Values, fixed, read_typed, shorten_value
from .base.moe_fields import ExpertSize, RouterLoss, expert_sizes
from .base.names import Fused, Names
from .base.rope import Rope
from .base.unused import LAYERS_BEHIND
from .mixtral import W1_W3_W2

_ROPE = Rope(theta=5e6, partial=1.0)


@dataclass(frozen=True)
class RotaryDim:
    """The rotary embedding, whose rotated fraction published files give as `rotary_dim` channels.

    head_dim: of files that do not say; None: by hidden_size and heads. written: whether an export has it as such.
    """

    rope: Rope = _ROPE
    head_dim: int | None = 128
    written: bool = False
    names: tuple[str, ...] = (*Rope.names, "rotary_dim")

    def read(self, hf: HFConfig) -> Values:
        channels = read_typed(hf, "rotary_dim", int, None)
        parts = [
            values.get("partial_rotary_factor")
            for values in (hf, hf.get("rope_parameters"))
            if isinstance(values, dict)
        ]
        if self.written and (strange := {part for part in parts if part is not None} - {1.0}):
            raise CheckpointError(
                f"config.json has partial_rotary_factor = {shorten_value(strange.pop())}, which transformers does not "
                "read in this family; supported: 1, and rotary_dim as published files have it"
            )
        if channels is None or (hf.get("partial_rotary_factor") is not None and not self.written):
            return self.rope.read(hf)
        hidden, heads = (read_typed(hf, name, int, 1) for name in ("hidden_size", "num_attention_heads"))
        head = read_typed(hf, "head_dim", int, None) or self.head_dim or hidden // max(heads, 1)
        if not 0 < channels <= head:
            raise CheckpointError(
                f"config.json has rotary_dim = {shorten_value(channels)} of {shorten_value(head)} channels"
            )
        return self.rope.read({**hf, "partial_rotary_factor": channels / head})

    def write(self, config: ModelConfig) -> Values:
        values, rope = self.rope.write(config), config.rope
        if self.written:
            values["rope_parameters"].pop("partial_rotary_factor", None)
        if self.written and rope.rotary_percent != 1.0:
            values["rotary_dim"] = round(config.attention.key_channels * rope.rotary_percent)
        return values


_FORM = Names(
    router="block_sparse_moe.gate", selection_bias="block_sparse_moe.e_score_correction_bias", experts=W1_W3_W2
)

MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fields=(
        *decoder_fields(max_positions=196608, kv_heads=8, head_dim=128),
        ExpertSize(),
        Fixed("attention.qk_layernorm", "full"),
        *expert_sizes(("num_local_experts", "num_experts"), 256, 8),
        *fixed({"moe.router.score": "sigmoid", "moe.router.expert_bias": True}),
        Only("use_qk_norm", True),
        Only("scoring_func", "sigmoid"),
        Only("use_routing_bias", True),
        RouterLoss(),
        RotaryDim(),
    ),
    names=_FORM,
    other_names=(
        replace(_FORM, form="fused", router="mlp.gate", selection_bias="mlp.e_score_correction_bias", experts=Fused()),
    ),
    unused=LAYERS_BEHIND,
)
