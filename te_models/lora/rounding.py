"""Rounding of merged weights to their dtype: to the nearest, or up or down at random, so that sums keep their mean."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic"]
_DROPPED_BITS = {torch.bfloat16: 16}
"""Bits of float32 that a dtype does not have, where its numbers are float32's cut short."""


class MergeErrors(NamedTuple):
    """Sums of squares over weights: of what rounding lost, and of what adapters changed."""

    lost: float
    changed: float


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return float32 values in `dtype`, each rounded away from zero with a probability that is its distance from the
    nearer number towards zero, in units of their spacing. Values that `dtype` has, infinities and NaN stay.

    Raises ValueError for a dtype other than bfloat16 and float32.
    """
    if dtype == values.dtype:
        return values
    if values.dtype != torch.float32 or dtype not in _DROPPED_BITS:
        raise ValueError(f"stochastic rounding is of float32 to bfloat16, not of {values.dtype} to {dtype}")
    dropped = _DROPPED_BITS[dtype]
    noise = torch.randint(1 << dropped, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    bits = (values.contiguous().view(torch.int32) + noise) & -(1 << dropped)
    # the largest numbers would carry over into infinity, and the bits of infinity and NaN count nothing
    found = torch.where(values.abs() <= torch.finfo(dtype).max, bits.view(torch.float32), values).to(dtype)
    return torch.where(found.isfinite() | ~values.isfinite(), found, values.to(dtype))
