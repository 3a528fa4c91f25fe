"""minimax: lightning attention in most layers, experts in all, residual connections from behind the norms (MiniMax-01,
arXiv 2501.08313).

Published files say `rotary_dim`, half of the channels of a head, as the report does; transformers 5.23 rotates all.
"""

from dataclasses import replace

from .base.common import decoder_fields
from .base.family import Family
from .base.fields import Field, HFConfig, Only, Values
from .base.layer_fields import AllLayersWindow
from .base.moe_fields import ExpertSize, RouterLoss, expert_sizes
from .base.names import Fused, Names
from .base.recurrent import LightningNames, Nested, RecurrentLayers
from .base.rope import Rope
from .base.unused import CONSTANTS, Unused
from .minimax_m2 import RotaryDim
from .mixtral import W1_W3_W2

_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Tables that follow from the number of heads and of layers."""
_FACTORS = tuple(
    Field(f"{theirs}_{factor}_factor", f"deep_norm.{ours}_{factor}", float, 1.0)
    for theirs, ours in (("full_attn", "attention"), ("linear_attn", "recurrent"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
)


class LightningLayers(RecurrentLayers):
    """Lightning attention has as many heads as attention, of the same size."""

    def mixer(self, hf: HFConfig, nested: Nested) -> Values:
        attention = nested["attention"]
        heads, channels = attention["num_attention_heads"], attention["kv_channels"]
        return super().mixer(hf, nested) | {"num_heads": heads, "head_dim": channels}

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        found = super().read(hf, nested)
        window = nested["attention"].get("window_size")
        names = found.get("layer_mixers", ["attention"] * nested["num_layers"])
        kinds = ["sliding" if window is not None and name == "attention" else "full" for name in names]
        return found | {"layer_types": kinds}


def _pattern(hf: HFConfig, layers: int) -> list[str]:
    return ["linear_attention" if i % 2 else "full_attention" for i in range(layers)]


_NAMES = Names(router="block_sparse_moe.gate", experts=W1_W3_W2, mixers={"lightning": LightningNames()})

MINIMAX = Family(
    model_type="minimax",
    architecture="MiniMaxForCausalLM",
    fields=(
        *decoder_fields(max_positions=131072, norm_eps=1e-5, kv_heads=8, without=("hidden_act",)),
        Only("hidden_act", "silu"),
        ExpertSize(),
        *expert_sizes("num_local_experts", 8, 2),
        RouterLoss(),
        AllLayersWindow(default=None),
        RotaryDim(Rope(theta=1e6, partial=1.0), head_dim=None, written=True),
        Only("postnorm", True),
        *_FACTORS,
    ),
    mixers=LightningLayers(kind="lightning", parts=(), pattern=_pattern),
    names=_NAMES,
    other_names=(replace(_NAMES, form="fused", router="mlp.gate", experts=Fused()),),
    unused=Unused((*CONSTANTS.patterns, *(f"*.self_attn.{name}" for name in _DECAYS))),
)
