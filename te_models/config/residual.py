"""The residual stream, where it is more than one vector of hidden_size per token, and what else layers add to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .part import ConfigPart, check

if TYPE_CHECKING:
    from .model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class DeepNormConfig(ConfigPart):
    """Residual connections of MiniMax-01 (arXiv 2501.08313; DeepNorm, arXiv 2203.00555): x = alpha n(x) + beta f(n(x)),
    n being the norm before a sublayer f. Each kind of sublayer has its alpha and its beta."""

    attention_alpha: float = 1.0
    """Factor of the normed input, in sublayers of softmax attention."""
    attention_beta: float = 1.0
    """Factor of the result, in sublayers of softmax attention."""
    recurrent_alpha: float = 1.0
    """Factor of the normed input, in sublayers of other mixers alone."""
    recurrent_beta: float = 1.0
    """Factor of the result, in sublayers of other mixers alone."""
    mlp_alpha: float = 1.0
    """Factor of the normed input, in sublayers of experts."""
    mlp_beta: float = 1.0
    """Factor of the result, in sublayers of experts."""


@dataclass(frozen=True, kw_only=True)
class HyperConnectionConfig(ConfigPart):
    """Manifold-constrained hyper-connections (mHC, arXiv 2512.24880): the stream has several lanes. A sublayer reads a
    weighted sum of them, adds its result to each by another weight, and mixes them by a matrix whose rows and columns
    add up to 1; all of these depend on the token."""

    lanes: int = 4
    """Vectors of hidden_size that the residual stream has for each token."""
    sinkhorn_iterations: int = 20
    """How often the mixing matrix is divided by the sums of its rows and columns."""
    epsilon: float = 1e-6
    """Added to weights, and to the sums of the matrix."""
    output: Literal["weighted", "mean"] = "weighted"
    """What the final norm reads: a weighted sum of the lanes, whose weights depend on the token, or their mean."""

    def _validate(self) -> None:
        for name in ("lanes", "sinkhorn_iterations"):
            check(getattr(self, name) > 0, f"hyper_connections.{name}", getattr(self, name), "a positive integer")
        check(self.epsilon > 0, "hyper_connections.epsilon", self.epsilon, "a positive number")


@dataclass(frozen=True, kw_only=True)
class AlternatingUpdatesConfig(ConfigPart):
    """AltUp (arXiv 2301.13310): the stream has several lanes, of which a layer reads one. It first predicts all lanes
    by a mix that depends on the token, runs on the prediction of that one, and corrects all by how wrong it was."""

    lanes: int = 4
    """Vectors of hidden_size that the residual stream has for each token."""
    active: int = 0
    """The lane that the layers read, from 0."""
    coef_clip: float | None = 120.0
    """Bound of the mixing weights in training; unset means none."""
    correct_scale: bool = True
    """Whether a learned factor of each channel multiplies what the embeddings of the layer read."""

    def _validate(self) -> None:
        where = "alternating_updates"
        check(self.lanes > 1, f"{where}.lanes", self.lanes, "2 or more")
        check(0 <= self.active < self.lanes, f"{where}.active", self.active, f"0 to {self.lanes - 1}")
        check(self.coef_clip is None or self.coef_clip > 0, f"{where}.coef_clip", self.coef_clip, "positive or null")


@dataclass(frozen=True, kw_only=True)
class PerLayerEmbeddingConfig(ConfigPart):
    """Embeddings of each layer (Gemma 3n): a second table gives each token a vector for every layer, added to a
    projection of the token's embedding. Behind its MLP a layer multiplies it by an activated projection of the stream,
    and adds the result, projected and normed."""

    vocab_size: int
    """Number of tokens that the table knows; others read its first row."""
    channels: int
    """Channels of each vector."""

    def _validate(self) -> None:
        for name in ("vocab_size", "channels"):
            check(getattr(self, name) > 0, f"per_layer_embedding.{name}", getattr(self, name), "a positive integer")


def check_additions(config: ModelConfig) -> None:
    """Raise ConfigError for what layers cannot have beside their mixers, MLPs and norms."""
    plain = config.block == "sandwich" and config.hyper_connections is None and config.residual_multiplier == 1.0
    every = all(config.mixer_names(i) and config.has_mlp(i) for i in range(config.num_layers))
    for name in ("alternating_updates", "laurel_rank", "per_layer_embedding", "layer_scalar"):
        value = getattr(config, name)
        check(plain or not value, name, value, "unset unless block is 'sandwich' without other residual factors")
        check(not value or not config.mtp_num_layers, "mtp_num_layers", config.mtp_num_layers, f"0 with {name}")
        check(every or not value, name, value, "unset in a model with layers of one sublayer")
    rank = config.laurel_rank
    alone = rank is None or all(config.mixer_of(i) is None for i in range(config.num_layers))
    check(alone and (rank is None or rank > 0), "laurel_rank", rank, "positive, in layers of attention alone, or null")
    for name in ("ffn_hidden_sizes", "activation_sparsity"):
        number = len(getattr(config, name) or ()) or None
        check(number in (None, config.num_layers), f"the number of {name}", number, f"num_layers = {config.num_layers}")
    sizes, sparse = config.ffn_hidden_sizes or (), config.activation_sparsity or ()
    check(all(size > 0 for size in sizes), "ffn_hidden_sizes", sizes, "positive integers")
    check(all(0 <= part < 1 for part in sparse), "activation_sparsity", sparse, "numbers from 0 to below 1")
    gated = config.mlp.gated and config.mlp.clamp is None and config.moe is None
    check(gated or not any(sparse), "activation_sparsity", sparse, "unset without plain gates, and with experts")


def has_compressed_keys(config: ModelConfig) -> bool:
    """Return whether queries of a layer see compressed keys."""
    attentions = (config.attention_of(layer) for layer in range(config.num_layers))
    return any(a is not None and a.compressed is not None and a.compressed.rate is not None for a in attentions)


def reads_tokens(config: ModelConfig) -> bool:
    """Return whether layers read the tokens beside the stream."""
    return config.per_layer_embedding is not None or (config.moe is not None and len(config.moe.hash_layers) > 0)
