"""What `torch.amp.autocast` asks of layers, and arithmetic that it must leave alone: operands of a recipe, exact in the
dtype that they have.

Autocast rounds operands of a product in float32 and in another 16-bit dtype to its own: forward, and in a compiled
graph, where the region of the forward pass is still in force, backward, too. What a region says is which dtype a layer
computes in; that has been heard when these operands are made.
"""

import contextlib

import torch
from torch import Tensor

from .torch_versions import constant_when_traced


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which no `torch.amp.autocast` of the device of x is in force, if there is one that would
    change the dtype of x; only then, for the compiler's cache does not take graphs with a region in them."""
    device = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype:
        return torch.amp.autocast(device, enabled=False)
    return contextlib.nullcontext()


@constant_when_traced  # torch guards its autocast itself; traced, each function named here would be one more guard
def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that an enabled `torch.amp.autocast` of this device asks for, or None."""
    known = device_type != "meta"  # for which torch raises
    return torch.get_autocast_dtype(device_type) if known and torch.is_autocast_enabled(device_type) else None


def autocast_dtype_of(x: Tensor) -> torch.dtype | None:
    """Return `autocast_dtype` of the device of x."""
    return autocast_dtype(x.device.type)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a GEMM on x runs in: an enabled `torch.amp.autocast`'s, else x's own. ValueError for
    integers, to which the weights would be rounded."""
    if not x.is_floating_point():
        require_floating(x.dtype)
    kind = x.device.type  # as `autocast_dtype`, without the call
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else x.dtype


def require_floating(dtype: torch.dtype) -> None:
    """Raise ValueError for the dtype of an input that a GEMM cannot compute in."""
    if not dtype.is_floating_point:
        raise ValueError(f"the input has dtype {dtype}; allowed: a floating-point dtype")
