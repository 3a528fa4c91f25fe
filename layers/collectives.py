"""Collectives along the first dimension that stay inside a compiled graph: torch's functional ones, waited for.

group: a process group or its name.
"""

from __future__ import annotations

from typing import Any

import torch.distributed._functional_collectives as functional
from torch import Tensor

# torch 2.13 has new names for them, and warns of the old ones
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def all_gather(x: Tensor, group: Any) -> Tensor:
    """[T, ...] of each rank -> [ranks T, ...], in rank order."""
    return functional.wait_tensor(_all_gather(x.contiguous(), 0, group))


def reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """[ranks T, ...] -> this rank's part [T, ...] of the sum over ranks."""
    return functional.wait_tensor(_reduce_scatter(x.contiguous(), "sum", 0, group))


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks, on every rank."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))
