"""LayerNorm and RMSNorm with Transformer Engine's arguments."""

from collections.abc import Callable
from typing import TypeVar

from ...module import norm
from ..arguments import takes_also, takes_at_default
from ..stands_for import StandsFor

F = TypeVar("F", bound=Callable[..., None])


def _taking(constructor: F) -> F:
    return takes_also(hidden_size="normalized_shape")(takes_at_default(sequence_parallel=None)(constructor))


class RMSNorm(norm.RMSNorm, metaclass=StandsFor):
    """Root mean square norm: `gamma * x / sqrt(mean(x^2) + eps)`.

    normalized_shape: the last dimension, or the last few. zero_centered_gamma: the weight stores gamma - 1. cast_order:
    where the product is rounded, see `te_models.kernels.norm`. Transformer Engine: `te.pytorch.RMSNorm`.
    """

    CORE = norm.RMSNorm

    __init__ = _taking(norm.RMSNorm.__init__)


class LayerNorm(norm.LayerNorm, metaclass=StandsFor):
    """Layer norm: `gamma * (x - mean) / sqrt(var + eps) + beta`; arguments as for RMSNorm, plus `bias`."""

    CORE = norm.LayerNorm

    __init__ = _taking(norm.LayerNorm.__init__)


NORMS: dict[str, type[RMSNorm | LayerNorm]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""By Transformer Engine's names."""
