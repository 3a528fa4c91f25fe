"""Optimizer moments in fewer bits: bfloat16, or FP8 with a float32 scale per 128 values.

A moment is a running average: a step moves it by less than the spacing of its format (beta2 = 0.999 changes it by
0.1 %, bfloat16's spacing is 0.4 %), and rounding to nearest would leave it where it is for ever. Both formats therefore
round stochastically, with counter-based bits, so that the average is right and a run can be repeated and resumed.

FP8 stores the second moment v as sqrt(v), which halves its range in powers of two. It is rounded up with the
probability that keeps the mean of the *square*, v itself: an unbiased root would add its variance to v in every step
and grow without bound. A positive value never rounds to zero, since the update divides by it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.quantize import scale_from_amax

MomentDtype = Literal["float32", "bfloat16", "float8"]
MOMENT_DTYPES = ("float32", "bfloat16", "float8")
BLOCK = 128
_FP8 = torch.float8_e4m3fn
_MIN_EXPONENT, _MANTISSA_BITS, _MAX = -6, 3, 448.0


def round_words(raw: Tensor, bits: Tensor) -> Tensor:
    """Round float32 numbers stochastically to ones that bfloat16 holds; both as their int32 words.

    bits: int32, the low 16 of which are used. Infinities and NaN stay. Words in and out, because Inductor's C++ backend
    (torch 2.13) casts bits one element at a time, which takes several times as long as the rounding.
    """
    finite = (raw & 0x7FFFFFFF) < 0x7F800000
    return torch.where(finite, (raw + (bits & 0xFFFF)) & -0x10000, raw)


def encode_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 x stochastically to bfloat16. bits: int32, the low 16 of which are used."""
    return round_words(x.view(torch.int32), bits).view(torch.float32).to(torch.bfloat16)


def _to_blocks(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _uniform(bits: Tensor, like: Tensor) -> Tensor:
    """Return the low 16 bits as numbers in [0, 1), in the blocks of `like`."""
    return _to_blocks((bits & 0xFFFF).float() * 2.0**-16).view_as(like)


def _neighbours(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return the E4M3 numbers at or below and above magnitudes of 0..448, float32."""
    # the exponent is in the float32's own bits; below 2^-6 the spacing stays what it is there
    exponent = (magnitude.clamp(min=2.0**_MIN_EXPONENT).view(torch.int32) >> 23) - _MANTISSA_BITS
    quantum = (exponent << 23).view(torch.float32)
    below = torch.floor(magnitude / quantum) * quantum
    return below, (below + quantum).clamp(max=_MAX)


def encode_first(x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (data [ceil(n / 128), 128] E4M3, scale_inv [ceil(n / 128)] float32) of a first moment of n values."""
    blocks = _to_blocks(x)
    scale = scale_from_amax(blocks.abs().amax(1), _FP8)
    scaled = (blocks * scale[:, None]).clamp(-_MAX, _MAX)
    magnitude = scaled.abs()
    below, above = _neighbours(magnitude)
    up = _uniform(bits, blocks) * (above - below) < magnitude - below
    data = torch.copysign(torch.where(up, above, below), scaled)
    return data.to(_FP8), torch.div(torch.ones_like(scale), scale)


def encode_second(v: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (data, scale_inv) of the square root of a second moment; shapes as for `encode_first`."""
    # by way of float64, because a float32 root is not correctly rounded everywhere (MKL's is one ulp off at times)
    root = _to_blocks(v).double().sqrt().float()
    scale = scale_from_amax(root.amax(1), _FP8)
    scaled = (root * scale[:, None]).clamp(max=_MAX)
    below, above = _neighbours(scaled)
    up = _uniform(bits, root) * (above * above - below * below) < scaled * scaled - below * below
    up = up | ((below == 0) & (scaled > 0))
    return torch.where(up, above, below).to(_FP8), torch.div(torch.ones_like(scale), scale)


def decode_first(data: Tensor, scale_inv: Tensor, shape: torch.Size) -> Tensor:
    """Return the first moment in float32."""
    return (data.float() * scale_inv[..., None]).view(-1)[: shape.numel()].view(shape)


def decode_second(data: Tensor, scale_inv: Tensor, shape: torch.Size) -> Tensor:
    """Return the second moment in float32."""
    return decode_first(data, scale_inv, shape).square_()
