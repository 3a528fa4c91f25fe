"""Integers with a scale, and perhaps a zero point, per group of a row: value = (code - zero) * scale.

Codes are unsigned, 0 .. 2^bits - 1; without zero points the zero is 2^(bits - 1). A scale has any sign. Two codes of
four bits are in a byte, the even one in the low half. Plain torch throughout, so that the compiler fuses it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def quantize_integers(
    x: Tensor, bits: int, group: int, scale_dtype: torch.dtype, *, zero_points: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (codes uint8 [..., R, C], not packed; scales [..., R, ceil(C/group)]; zero points uint8, likewise, or
    None).

    x: [..., R, C], floating-point. Scales are computed in float32 and rounded to `scale_dtype`; a group of zeros has
    the smallest normal scale. Without zero points the largest magnitude is at the middle of the last step,
    amax / (2^bits - 1) * 2; with them, the range from the smallest to the largest value, 0 included, has 2^bits - 1
    steps: the scales of compressed-tensors.
    """
    columns, top = x.shape[-1], 2**bits - 1
    groups = F.pad(x.float(), (0, -columns % group)).unflatten(-1, (-1, group))
    if zero_points:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high - low) / top
    else:
        low, scale = None, groups.abs().amax(-1) / (top / 2)
    scale = scale.to(scale_dtype)
    scale = torch.where(scale == 0, torch.finfo(scale_dtype).tiny, scale).to(scale_dtype)
    wide = scale.float()
    zero = None if low is None else (-low / wide).round().clamp(0, top)
    offset = 2 ** (bits - 1) if zero is None else zero[..., None]
    codes = ((groups / wide[..., None]).round() + offset).clamp(0, top)
    codes = codes.flatten(-2)[..., :columns].to(torch.uint8)
    return codes, scale, None if zero is None else zero.to(torch.uint8)


def dequantize_integers(
    codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Return the values [..., R, C] of codes [..., R, C], in `dtype`: a float32 product, rounded once."""
    columns = codes.shape[-1]
    group = min(group, max(1, columns))
    padding = -columns % group
    wide = (F.pad(codes, (0, padding)) if padding else codes).unflatten(-1, (-1, group)).float()
    wide = wide - (2 ** (bits - 1) if zero is None else zero.float()[..., None])
    values = (wide * scale.float()[..., None]).to(dtype).flatten(-2)
    return values[..., :columns] if padding else values


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return codes 0 .. 15, uint8 [..., C], two in a byte: [..., ceil(C/2)]; a last odd one has a zero beside it."""
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, columns: int) -> Tensor:
    """Undo `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :columns]
