"""Questions about the device under Transformer Engine's module path.

May import: `..te`.
"""

from typing import Any

from ..te.names import is_bf16_available, missing

__all__ = ["is_bf16_available"]

_ELSEWHERE = ("deinterleave_glu_tensor", "get_cudnn_version", "get_device_compute_capability", "interleave_glu_tensor")
"""Names of Transformer Engine's module; asking says what to use instead."""


def __getattr__(name: str) -> Any:
    raise AttributeError(missing(name) if name in _ELSEWHERE else f"module {__name__!r} has no attribute {name!r}")
