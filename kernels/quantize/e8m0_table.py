"""E8M0 scales of 16-bit numbers on CPU, looked up: there are 32,768 magnitudes, and each scale takes two dozen
operations, which cost a third of the quantization to 1x32 blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

Formula = Callable[[Tensor], Tensor]


def look_up(magnitudes: Tensor, dtype: torch.dtype, byte: Formula, inverse: Formula) -> tuple[Tensor, Tensor]:
    """Return, for each amax, the float32 factor to multiply its block with, and the byte that is stored.

    Arguments:
        magnitudes: int16, the bits of amaxes of a 16-bit floating `dtype`.
        byte, inverse: the definitions, of an amax and of a byte; functions that stay, as the tables are kept.
    """
    bytes_of, inverses_of = _tables(dtype, byte, inverse)
    stored = bytes_of.index_select(0, magnitudes.flatten().int())
    factor = inverses_of.index_select(0, stored.int())
    return factor.view(magnitudes.shape), stored.view(magnitudes.shape)


@functools.cache
def _tables(dtype: torch.dtype, byte: Formula, inverse: Formula) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        amax = torch.arange(1 << 15, dtype=torch.int16, device="cpu").view(dtype)
        return byte(amax), inverse(torch.arange(256, dtype=torch.uint8, device="cpu"))
