"""The optimizers of `te_models.layers` under Transformer Engine's module path.

May import: `te_models.layers`, lazily.
"""

from typing import TYPE_CHECKING, Any

from ..te_compat.names import from_layers

if TYPE_CHECKING:
    from ..optimizer.fused_adamw import FusedAdamW

__all__ = ["FusedAdamW"]


def __getattr__(name: str) -> Any:
    return from_layers(__name__, name, (*__all__, "FusedAdam", "FusedSGD"))
