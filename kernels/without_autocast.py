"""Arithmetic that `torch.amp.autocast` must leave alone: operands of a recipe, exact in the dtype that they have.

Autocast rounds operands of a product in float32 and in another 16-bit dtype to its own: forward, and in a compiled
graph, where the region of the forward pass is still in force, backward, too. What a region says is which dtype a layer
computes in; that has been heard when these operands are made.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which no `torch.amp.autocast` of the device of x is in force, if there is one that would
    change the dtype of x; only then, for the compiler's cache does not take graphs with a region in them."""
    device = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype:
        return torch.amp.autocast(device, enabled=False)
    return contextlib.nullcontext()
