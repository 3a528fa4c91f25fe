"""Norms of the residual stream, and what stands at its two ends: token embedding and output layer."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from .part import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class NormConfig(ConfigPart):
    """Normalisation of the residual stream.

    cast_order decides bf16 bits: "weight_last" is `w * x_hat.to(dtype)`, "weight_first" `(w * x_hat).to(dtype)` in
    float32.
    """

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Kind of norm."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance or the mean square."""
    layernorm_zero_centered_gamma: bool = False
    """Whether the stored weight is the factor minus 1."""
    cast_order: Literal["weight_last", "weight_first"] = "weight_last"
    """Whether a low-precision result is rounded before the weight multiplies it (weight_last) or after."""
    has_weight: bool = True
    """Whether the norm has a weight."""
    bias: bool = False
    """Whether a LayerNorm has a bias."""

    def _validate(self) -> None:
        check(self.layernorm_epsilon > 0, "norm.layernorm_epsilon", self.layernorm_epsilon, "a positive number")
        check(not (self.bias and self.normalization == "RMSNorm"), "norm.bias", self.bias, "false with RMSNorm")
        check(self.has_weight or not self.bias, "norm.bias", self.bias, "false when norm.has_weight is false")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(ConfigPart):
    """Token embedding and output layer."""

    share_embeddings_and_output_weights: bool = False
    """Whether the output layer uses the weight of the token embedding."""
    position_embedding_type: Literal["rope", "learned_absolute", "sinusoidal", "alibi", "none"] = "rope"
    """How positions enter: rotary embedding, a learned or a computed vector for each position, a bias of each score by
    the distance (ALiBi, arXiv 2108.12409), or not at all."""
    position_offset: int = 0
    """Rows of the learned or computed positions before that of the first one."""
    positions_from_mask: bool = False
    """Whether positions count the tokens that attention_mask marks, where a call has no position_ids (OPT)."""
    multiplier: float | Literal["sqrt_hidden_in_weight_dtype"] = 1.0
    """Factor of the embeddings; sqrt_hidden_in_weight_dtype is sqrt(hidden_size), rounded to the weight's dtype."""
    logits_multiplier: float = 1.0
    """Factor of the logits."""
    logits_softcap: float | None = None
    """Bound of the tanh soft cap of the logits; unset means none."""
    output_bias: bool = False
    """Whether the output layer has a bias."""
    embedding_dropout: float | None = None
    """Probability with which embeddings are dropped in training; unset means hidden_dropout, as in Megatron-Core."""
    padding_idx: int | None = None
    """Token whose embedding gets no gradient from the input, as of torch's and transformers' embeddings; unset means
    none."""

    layernorm: bool = False
    """Whether the embeddings are normalised, by a norm of the layers' kind with separate weights."""

    _LATER: ClassVar[frozenset[str]] = frozenset(
        {"embedding_dropout", "padding_idx", "position_offset", "positions_from_mask", "layernorm"}
    )

    def _validate(self) -> None:
        cap, p = self.logits_softcap, self.embedding_dropout
        check(cap is None or cap > 0, "embedding.logits_softcap", cap, "a positive number or null")
        check(p is None or 0 <= p < 1, "embedding.embedding_dropout", p, "0 <= p < 1, or null")
        offset, vectors = self.position_offset, self.position_embedding_type in ("learned_absolute", "sinusoidal")
        check(offset >= 0, "embedding.position_offset", offset, "zero or a positive integer")
        check(vectors or not offset, "embedding.position_offset", offset, "0 without a vector for each position")
        of_mask, what = self.positions_from_mask, "false without a vector for each position"
        check(vectors or not of_mask, "embedding.positions_from_mask", of_mask, what)
