"""The entries of FusedAdam's state in few bits, as Transformer Engine's optimizer defines them.

float16 and FP8 (E4M3) are stored divided by one scale per tensor, so that the amax becomes the largest number in use;
bfloat16 is stored without one. All three round to nearest. (`moments` has stochastic ones, with scales per block.)

A float32 master of a bfloat16 weight is the weight's 16 bits and 16 more, the remainder:

    master = weight * 2^16 + remainder      as 32-bit integers, the remainder signed

so the weight is the master rounded to the nearer bfloat16 (a tie away from zero), and a carry out of the lower half has
already been added to the weight where the remainder is negative.
"""

import torch
from torch import Tensor

from ...tensor.fsdp import local_part

STORED_AS: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float32,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.uint8: torch.float8_e4m3fn,
}
"""What an option asks for, in Transformer Engine's terms -> the dtype of the tensor in the state."""
LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2, torch.float8_e4m3fn: 448.0}
"""The number that the amax of a scaled entry becomes."""


def decode(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Return an entry in float32, sharded alike; the very tensor where it is stored so. scale: [1], or None."""
    if stored.dtype is torch.float32:
        return stored
    unscaled = stored.float()
    if scale is not None:
        local_part(unscaled).mul_(scale)
    return unscaled


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return (x as it is stored in `dtype`, its scale [1], or None for a dtype without one). x: float32, not
    sharded."""
    if dtype not in LARGEST:
        return x.to(dtype), None
    scale = (x.abs().amax() if x.numel() else x.new_zeros(())).reshape(1) / LARGEST[dtype]
    inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
    return (x * inverse).to(dtype), scale


def whole_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of a bfloat16 weight and its int16 remainder."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weight bfloat16, remainder int16) of a float32 master."""
    bits = master.view(torch.int32)
    remainder = bits.to(torch.int16)
    return ((bits - remainder.int()) >> 16).to(torch.int16).view(torch.bfloat16), remainder
