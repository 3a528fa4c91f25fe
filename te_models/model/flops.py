"""Floating-point operations of a model: the multiplications and additions of its GEMMs, from its configuration.

Norms, activations, softmax and the router's choice are left out, as model FLOPs utilization leaves them out (PaLM,
arXiv 2204.02311, appendix B). A query counts the keys that it sees: half a sequence on average, or a window.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.param_shapes import is_expert_stack

from ..config import ModelConfig

_NO_GEMM = (
    *("embedding.word", "embedding.position", "per_layer_embedding.weight"),
    *("layernorm", "layer_norm", "bias", "rotary", ".A_log"),
)
"""Parts of the names of parameters that no GEMM multiplies by."""


@lru_cache(maxsize=8)
def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Return the FLOPs of one forward pass, divided by its tokens; a training step takes three times as many.

    sequence_length: of the texts; they begin without a cache.
    """
    return 2.0 * _active_weights(config) + _mixer_flops(config, sequence_length)


@lru_cache(maxsize=8)
def attention_share(config: ModelConfig, sequence_length: int) -> float:
    """Return the part of a pass's FLOPs that mixers have of the sequence, beside the GEMMs with weights."""
    return _mixer_flops(config, sequence_length) / forward_flops_per_token(config, sequence_length)


def weight_flops_per_token(config: ModelConfig, counted: Callable[[str], bool]) -> float:
    """Return the FLOPs of a forward pass per token of the products with weights that are `counted`, by name in the
    grouped layout."""
    return 2.0 * _active_weights(config, counted)


@lru_cache(maxsize=8)
def shared_expert_share(config: ModelConfig, sequence_length: int) -> float:
    """Return the part of a pass's FLOPs that shared experts have."""
    shapes = expected_tensors(config, "grouped").items()
    weights = sum(math.prod(shape) for name, shape in shapes if ".shared_experts.linear_" in name and len(shape) == 2)
    return 2.0 * weights / forward_flops_per_token(config, sequence_length)


def flops_by_layer(config: ModelConfig, sequence_length: int) -> tuple[list[float], float]:
    """Return the FLOPs of a forward pass per token of each layer, and of what is behind the last one: the output layer,
    and the layers that predict further tokens. Blocks that layers share count nowhere."""
    layers, further = _mixer_flops_by_layer(config, sequence_length), 0.0
    for name, shape in expected_tensors(config, "grouped").items():
        if len(shape) < 2 or any(word in name for word in _NO_GEMM):
            continue
        flops = 2.0 * _share(config, name) * math.prod(shape)
        if name.startswith("decoder.layers."):
            layers[int(name.split(".")[2])] += flops
        elif name.startswith(("output_layer.", "mtp.")):
            further += flops
    heads = config.mtp_num_layers  # each has the output layer once more
    logits = 2.0 * config.vocab_size * config.hidden_size
    tied = config.embedding.share_embeddings_and_output_weights
    return layers, further + logits * (heads + int(tied))


def training_flops_per_token(
    config: ModelConfig,
    sequence_length: int,
    *,
    frozen: Callable[[str], bool] | None = None,
    lora: Mapping[str, int] | None = None,
) -> float:
    """Return the FLOPs of forward and backward pass per token; what is computed again counts nothing.

    frozen: whether a parameter of this name, in the grouped layout, is not trained: its gradient is not computed, while
    gradients pass it. lora: the ranks of adapters by the name of the weight that they adapt, in the grouped layout.
    """
    total = 3.0 * forward_flops_per_token(config, sequence_length)
    if frozen is not None:
        total -= 2.0 * _active_weights(config, frozen)
    shapes = expected_tensors(config, "grouped") if lora else {}
    for name, rank in (lora or {}).items():
        *lead, rows, columns = shapes[name]
        total += 6.0 * _share(config, name) * math.prod(lead) * rank * (rows + columns)
    return total


def _active_weights(config: ModelConfig, counted: Callable[[str], bool] = lambda name: True) -> float:
    """Count the elements of the matrices that a token is multiplied by. counted: which do, by name."""
    total = 0.0
    for name, shape in expected_tensors(config, "grouped").items():
        if len(shape) < 2 or any(word in name for word in _NO_GEMM) or not counted(name):
            continue
        total += _share(config, name) * math.prod(shape)
    if config.embedding.share_embeddings_and_output_weights and counted("embedding.word_embeddings.weight"):
        total += config.vocab_size * config.hidden_size
    return total


def _share(config: ModelConfig, name: str) -> float:
    """Return the part of a matrix, or of a stack of them, that a token is multiplied by; how often, where layers share
    it."""
    if name.startswith("decoder.shared_blocks.") and config.shared_blocks is not None:
        uses = [config.shared_block_of(layer) for layer in config.shared_blocks.layers]
        return float(uses.count(int(name.split(".")[2])))
    if not is_expert_stack(name):
        return 1.0
    assert config.moe is not None
    return config.moe.moe_router_topk / config.moe.num_moe_experts


def _mixer_flops(config: ModelConfig, length: int) -> float:
    """Return the FLOPs of mixers beside their weights' GEMMs, as of scores and of their sum of values, per token."""
    return sum(_mixer_flops_by_layer(config, length))


def _mixer_flops_by_layer(config: ModelConfig, length: int) -> list[float]:
    found = []
    for layer in range(config.num_layers):
        window = config.window_size(layer) or config.chunk_size(layer)
        attention, mixer = config.attention_of(layer), config.mixer_of(layer)
        own = 0.0 if attention is None else attention.flops(_keys_seen(length, window))
        found.append(own + (0.0 if mixer is None else mixer.flops(length)))
    return found


def _keys_seen(length: int, window: int | None) -> float:
    """Return how many keys a query sees on average, itself included."""
    if window is None or window >= length:
        return (length + 1) / 2
    return window - window * (window - 1) / (2 * length)
