"""torchtitan's checkpoints: llama3 and qwen3, dense and mixtures, with AdamW's moments.

llama3 rotates pairs of neighbouring channels, so the rows of q and k are in another order than in a model that rotates
halves. qwen3 (with norms of q and k) rotates halves. Moments are named by parameter:
`optimizer.state.layers.0.attention.wq.weight.exp_avg`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from te_models.config import ModelConfig

from ..families.base.family import HasShape
from ..families.base.names import Names, Weights
from ..io.errors import CheckpointError
from ..mapping.blocks import joined
from ..mapping.layout_ops import At, Layout
from ..mapping.param_shapes import head_sizes
from .layouts import InterleavedHeads
from .system import System, is_optimizer


@dataclass(frozen=True)
class _Experts:
    """Three stacks of all experts of a layer."""

    def weights(self, config: ModelConfig, ours: str, at: str) -> Weights:
        assert config.moe is not None, "called for MoE layers only"
        fc1, w = f"{ours}linear_fc1.weight", f"{at}moe.experts.w"
        yield fc1, joined(config, fc1, At(f"{w}1"), At(f"{w}3"), dim=1)
        yield f"{ours}linear_fc2.weight", At(f"{w}2")


_NAMES = Names(
    embedding="tok_embeddings",
    final_norm="norm",
    output="output",
    layer="layers.{i}",
    norms=("attention_norm", None, "ffn_norm", None),
    qkv=("attention.wq", "attention.wk", "attention.wv"),
    qk_norms=("attention.q_norm", "attention.k_norm"),
    proj="attention.wo",
    fc1=("feed_forward.w1", "feed_forward.w3"),
    fc2="feed_forward.w2",
    router="moe.router.gate",
    selection_bias="moe.expert_bias",
    experts=_Experts(),  # type: ignore[arg-type]
    shared_fc1=("moe.shared_experts.w1", "moe.shared_experts.w3"),
    shared_fc2="moe.shared_experts.w2",
)


def _weights(config: ModelConfig, found: Mapping[str, HasShape] | None) -> Iterator[tuple[str, Layout]]:
    attention = config.attention
    if attention.mla is not None or config.mixers or attention.add_qkv_bias or attention.gate_rows:
        raise CheckpointError(
            "torchtitan's checkpoints are read and written of models with plain attention (llama3, qwen3); this one "
            "has latent attention, another mixer, a gate, or biases of q, k and v"
        )
    heads, groups, _ = head_sizes(attention)
    pairs = attention.qk_layernorm == "none" and config.rope.style == "half"
    for name, layout in _NAMES.weights(config):
        if pairs and name.endswith(".linear_qkv.weight"):
            at = f"layers.{name.split('.')[2]}.attention."
            q, k = InterleavedHeads(f"{at}wq.weight", heads), InterleavedHeads(f"{at}wk.weight", groups)
            yield name, joined(config, name, q, k, At(f"{at}wv.weight"))
        else:
            yield name, layout


def _is_other(name: str) -> bool:
    return is_optimizer(name) or name.startswith(
        ("train_state", "lr_scheduler", "dataloader", "freqs_cis", "rope_cache")
    )


TORCHTITAN = System(
    "torchtitan", _weights, lambda name, state: f"optimizer.state.{name}.{state}", masters=(), is_other=_is_other
)
