"""Questions about the device under Transformer Engine's module path.

May import: `te_models.layers`, lazily.
"""

from typing import TYPE_CHECKING, Any

from ..te_compat.names import from_layers

if TYPE_CHECKING:
    from ..te_compat.names import is_bf16_available

__all__ = ["is_bf16_available"]

_THEIRS = (
    *("deinterleave_glu_tensor", "get_cudnn_version", "get_device_compute_capability", "interleave_glu_tensor"),
    "is_bf16_available",
)


def __getattr__(name: str) -> Any:
    return from_layers(__name__, name, _THEIRS)
