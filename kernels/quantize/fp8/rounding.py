"""Rounding to FP8 numbers without making FP8: quantization and dequantization at once, for operands on CPU.

The same numbers, bit for bit, as the cast there and back. It is float32 arithmetic alone, which compilers vectorise:
8 M elements take 2.4 ms instead of 3.9 (E4M3) and 14.9 ms (E5M2, whose casts Inductor's C++ backend does one by one).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import amax, once, per_element
from .reference import block_scales, e8m0_to_float, scale_from_amax


def round_fp8(v: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return float32 v rounded to the nearest FP8 number, ties to even, in float32. NaN stays, infinities saturate.

    With p significant bits, m = v * 2^(24 - p) has its last place where v is to have its own, so m - (m - v) is v
    rounded there (after Veltkamp and Dekker, Numerische Mathematik 18, 1971): a tie's last bit is 0, so m is even and
    the even difference is that of an even result; and where m - v falls into the binade below, v is next to a power of
    two, which a finer rounding reaches as well. Subnormals have a fixed last place: that of a constant added to them.
    """
    e4m3 = fp8_dtype is torch.float8_e4m3fn
    limit = torch.finfo(fp8_dtype).max
    v = v.clamp(-limit, limit)
    m = v * (2.0**20 if e4m3 else 2.0**21)
    normal = m - (m - v)
    # 1.5 * 2^23 last places: 2^-9 in E4M3, 2^-16 in E5M2
    constant = 1.5 * 2.0**14 if e4m3 else 1.5 * 2.0**7
    subnormal = (v + constant) - constant
    rounded = torch.where(v.abs() < torch.finfo(fp8_dtype).smallest_normal, subnormal, normal)
    return torch.copysign(rounded, v)  # the sign of a zero


def round_per_tensor(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what `quantize_per_tensor` does in `dtype`: the numbers themselves, still scaled."""
    return round_fp8(x.float() * scale, fp8_dtype).to(dtype)


def round_current(
    x: Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype, *, pow2: bool = False, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scale each matrix of x [..., R, C] by its own amax: return (`round_per_tensor` of it, what is left to multiply
    with, float32 [...])."""
    scale = scale_from_amax(amax(x), fp8_dtype, pow2=pow2, epsilon=epsilon)
    values = round_per_tensor(x, scale[..., None, None], fp8_dtype, dtype)
    return values, torch.div(torch.ones_like(scale), scale)


def round_blockwise(
    x: Tensor,
    block: tuple[int, int],
    fp8_dtype: torch.dtype,
    scale_kind: str,
    dtype: torch.dtype,
    *,
    epsilon: float = 0.0,
) -> Tensor:
    """Return `dequantize_blockwise` of `quantize_blockwise` in `dtype`: x [..., R, C] as its blocks hold it."""
    if x.numel() == 0:
        return x.to(dtype)
    scale, stored = block_scales(x, block, fp8_dtype, scale_kind, epsilon=epsilon)
    size = x.shape[-2:]
    values = round_fp8(x.float() * per_element(scale, block, *size), fp8_dtype)
    scale_inv = once(e8m0_to_float(stored)) if stored.dtype == torch.uint8 else stored
    return (values * per_element(scale_inv, block, *size)).to(dtype)
