"""The residual stream, where it is more than one vector of hidden_size per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .part import ConfigPart, check


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
