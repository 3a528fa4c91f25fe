"""Quantization and dequantization at once, for operands on CPU.

Compiled, no FP8 is made: the same numbers, bit for bit, as the cast there and back come out of float32 arithmetic
alone, and compilers vectorise it: 8 M elements take 2.4 ms instead of 3.9 (E4M3) and 14.9 ms (E5M2, whose casts
Inductor's C++ backend does one by one). Eagerly that arithmetic is a pass over memory for each of its dozen operations,
and the casts are the faster way: 1024 x 1024 in 32-blocks takes 4 ms instead of 20. Scales are looked up there, for an
amax of 16-bit numbers is one of 32,768.
"""

import functools

import torch
from torch import Tensor

from ...torch_versions import saturating_cast
from ..eager import eager_on_cpu
from .blocks import amax, once_per_block, per_element
from .cpu import fp8_to_float
from .reference import (
    block_scales,
    dequantize_blockwise,
    e8m0_from_amax,
    e8m0_inverse,
    e8m0_to_float,
    quantize_blockwise,
    quantize_blockwise_both,
    scale_from_amax,
)

Block = tuple[int, int]


def round_fp8(v: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return float32 v rounded to the nearest FP8 number, ties to even, in float32. NaN stays, infinities saturate.

    With p significant bits, m = v * 2^(24 - p) has its last place where v is to have its own, so m - (m - v) is v
    rounded there (after Veltkamp and Dekker, Numerische Mathematik 18, 1971): a tie's last bit is 0, so m is even and
    an even difference means an even result; and where m - v falls into the binade below, v is next to a power of two,
    and a finer rounding reaches it as well. Subnormals have a fixed last place: a constant added to them has it.
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
    if eager_on_cpu(x):
        return quantize_and_round(x, block, fp8_dtype, scale_kind, dtype, epsilon=epsilon)[0]
    scale, stored = block_scales(x, block, fp8_dtype, scale_kind, epsilon=epsilon)
    size = x.shape[-2:]
    values = round_fp8(x.float() * per_element(scale, block, *size), fp8_dtype)
    scale_inv = once_per_block(e8m0_to_float(stored)) if stored.dtype == torch.uint8 else stored
    return (values * per_element(scale_inv, block, *size)).to(dtype)


def quantize_and_round(
    x: Tensor,
    block: Block,
    fp8_dtype: torch.dtype,
    scale_kind: str,
    dtype: torch.dtype,
    *,
    epsilon: float = 0.0,
    both: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Quantize x: [..., R, C] and return (`round_blockwise` of it, what `quantize_blockwise` returns of it).

    both: what `quantize_blockwise_both` returns, instead; the values equal `block`'s.
    """
    shapes = [_in_memory(x, b) for b in ((block, (block[1], block[0])) if both else (block,))]
    if x.dtype.itemsize != 2 or None in shapes or not eager_on_cpu(x):
        quantize = quantize_blockwise_both if both else quantize_blockwise
        parts = quantize(x, block, fp8_dtype, scale_kind, epsilon=epsilon)
        return dequantize_blockwise(parts[0], parts[1], block, dtype), parts
    stored_of, scale_of, scale_inv_of = _tables(x.dtype, fp8_dtype, scale_kind, epsilon)
    magnitudes = x.view(torch.int16) & 0x7FFF  # ordered like the numbers, NaN above all
    size, values, found = x.shape, x, []
    for shape in shapes:
        blocks = magnitudes.view(shape)  # type: ignore[arg-type]
        if len(shape) == 2:  # type: ignore[arg-type]
            largest = blocks.int().amax(1)  # reducing rows of 32 is fast in int32, and not in int16
            scale, scale_inv = scale_of.index_select(0, largest), scale_inv_of.index_select(0, largest)
            grid = (*size[:-1], -1)
        else:
            largest = blocks.amax(1).int().view(-1)
            scale = scale_of.index_select(0, largest).view(-1, 1, size[-1])
            scale_inv = scale_inv_of.index_select(0, largest).view(-1, 1, size[-1])
            grid = (*size[:-2], -1, size[-1])
        data = saturating_cast(x.float().view(shape).mul_(scale), fp8_dtype)  # type: ignore[arg-type]
        if not found:
            values = fp8_to_float(data).mul_(scale_inv).to(dtype).view(size)
        found += [data.view(size), stored_of.index_select(0, largest).view(grid)]
    return values, tuple(found)


def _in_memory(x: Tensor, block: Block) -> tuple[int, ...] | None:
    """Return how blocks of one row [blocks, columns], or of one column [blocks, rows, C], of x: [..., R, C] lie in
    memory; None where they do not cover it, or x is not contiguous. The block of a matrix with fewer rows has those."""
    rows, columns = x.shape[-2:]
    if not x.is_contiguous() or not rows * columns:
        return None
    if block[0] == 1:
        return (-1, block[1]) if columns % block[1] == 0 else None
    height = min(block[0], rows) if x.dim() == 2 else block[0]
    return (-1, height, columns) if block[1] == 1 and rows % height == 0 else None


@functools.lru_cache(64)
def _tables(
    dtype: torch.dtype, fp8_dtype: torch.dtype, scale_kind: str, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each magnitude of a 16-bit dtype as the amax of a block, what is stored of its scale, what the block
    is multiplied with before the cast, and after it: [32768, 1] each."""
    with torch.inference_mode(False):
        largest = torch.arange(1 << 15, dtype=torch.int16, device="cpu").view(dtype)[:, None]
        if scale_kind == "e8m0":
            stored = e8m0_from_amax(largest, fp8_dtype)
            return stored, e8m0_inverse(stored), e8m0_to_float(stored)
        overflow = torch.finfo(dtype).max
        scale = scale_from_amax(largest, fp8_dtype, pow2=scale_kind == "pow2", epsilon=epsilon, overflow=overflow)
        scale_inv = torch.div(torch.ones_like(scale), scale)
        return scale_inv, scale, scale_inv
