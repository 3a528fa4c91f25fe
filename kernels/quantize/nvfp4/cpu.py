"""NVFP4 on CPU: eagerly in few and fast operations (see `eager`), a few rows at a time, else by the definition.

A code comes from two sums that float32 rounds as E2M1 does, to nearest and ties to even:

    m + (2^23 - 2)    in steps of 1/2 up to 2^23, where m is 2, and of 1 above: E2M1's steps up to 4
    m + (2^24 + 8)    in steps of 2: E2M1's steps from 4 on

As integers the bits of a float count its steps, and so do E2M1's codes. So less the bits that stand for code 0, the
first sum is the code up to 4 and the second from there on, and each of them is the smaller one where it holds.

Rounded stochastically, a number is counted in the step that its exponent tells, and a comparison with the random
number is the sign of a difference (exact, as both are multiples of the same power of two or less than 1 apart).

A code becomes a number as float16, whose exponent and mantissa it is at 2^-14 of the value, subnormals included.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..eager import eager_on_cpu
from ..fp8.blocks import largest_of_blocks, to_blocks
from ..fp8.cpu import e4m3_to_float
from ..random import random_bits, unit_interval
from . import reference
from .reference import BLOCK

_TILE = 1 << 18  # elements worked on at a time: a few calls, and buffers that stay in the cache
_UP_TO_4, _FROM_4 = 2.0**23 - 2, 2.0**24 + 8
_APART = 0x4B800000 - 0x4AFFFFFC  # from the bits of code 0 in the first sum, 2^23 - 2, to the bits of 2^24
_LARGEST = torch.finfo(torch.float32).max


class _Form(NamedTuple):
    """A dtype that is served, as integers: the mask of a magnitude, and the shift that brings the sign to bit 3."""

    integer: torch.dtype
    magnitude: int
    shift: int


_FORMS = {
    torch.bfloat16: _Form(torch.int16, 0x7FFF, 12),
    torch.float16: _Form(torch.int16, 0x7FFF, 12),
    torch.float32: _Form(torch.int32, 0x7FFFFFFF, 28),
}


def uses_nvfp4_library(x: Tensor, block: tuple[int, int]) -> bool:
    """Whether x can be rounded here: it is computed with now, has elements, and is in whole blocks."""
    if not eager_on_cpu(x) or x.dtype not in _FORMS or x.numel() == 0:
        return False
    return x.shape[-2] % block[0] == 0 and x.shape[-1] % block[1] == 0


def quantize_nvfp4(
    x: Tensor, *, block_rows: int = 1, amax: Tensor | None = None, key: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.quantize_nvfp4`."""
    block = (block_rows, BLOCK)
    found = _scales(x, block, amax) if block_rows in (1, BLOCK) and uses_nvfp4_library(x, block) else None
    if found is None:
        return reference.quantize_nvfp4(x, block_rows=block_rows, amax=amax, key=key, stream=stream)
    scales, _, factors, amax = found
    packed = packed_codes(x, factors, block, None if key is None else random_bits(key, stream, x.shape))
    if block_rows > 1:
        scales = scales.view(torch.uint8).repeat_interleave(block_rows, -2).view(torch.float8_e4m3fn)
    return packed, scales.contiguous(), amax


def round_nvfp4(
    x: Tensor,
    dtype: torch.dtype,
    *,
    block: tuple[int, int] = (1, BLOCK),
    amax: Tensor | None = None,
    key: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `reference.round_nvfp4`."""
    found = _scales(x, block, amax) if uses_nvfp4_library(x, block) else None
    if found is None:
        return reference.round_nvfp4(x, dtype, block=block, amax=amax, key=key, stream=stream)
    _, scales, factors, amax = found
    random = None if key is None else reference.rounding_bits(x, block, key, stream)
    return rounded_blocks(x, factors, scales, block, dtype, random), amax


def round_current_nvfp4(
    x: Tensor,
    dtype: torch.dtype,
    *,
    block: tuple[int, int] = (1, BLOCK),
    key: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Scale each matrix of x [..., R, C] by its own amax: return (`round_nvfp4` of it, what is left to multiply with,
    float32 [...])."""
    values, amax = round_nvfp4(x, dtype, block=block, key=key, stream=stream)
    return values, reference.global_decode(amax)


def decode_blocks(packed: Tensor, scales: Tensor, columns: int) -> Tensor:
    """See `reference.decode_blocks`."""
    if eager_on_cpu(packed) and packed.numel() and columns == BLOCK * scales.shape[-1]:
        return decoded_blocks(packed, scales)
    return reference.decode_blocks(packed, scales, columns)


def dequantize_nvfp4(packed: Tensor, scales: Tensor, amax: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """See `reference.dequantize_nvfp4`."""
    return reference.times_global(decode_blocks(packed, scales, columns), amax, dtype)


def _scales(x: Tensor, block: tuple[int, int], amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return `reference.nvfp4_block_scales` and the amax; None where a NaN is among them: its codes are the
    definition's."""
    form = _FORMS[x.dtype]
    largest = largest_of_blocks(x.detach().view(form.integer) & form.magnitude, block)
    if amax is None:
        amax = largest.amax((-2, -1)).view(x.dtype).float()
    found = reference.nvfp4_block_scales(largest.view(x.dtype).float(), amax)
    return (*found, amax) if bool(found[2].amax() <= _LARGEST) else None


def packed_codes(x: Tensor, factors: Tensor, block: tuple[int, int], random: Tensor | None = None) -> Tensor:
    """Return the packed codes [..., R, C / 2] of x [..., R, C], each block multiplied by its factor; C is even.

    factors: float32 [..., R / block[0], C / block[1]], positive and finite. random: int32 bits of x's shape to round
    stochastically with; None rounds to nearest.
    """
    packed = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
    out, x, factors = packed.flatten(0, -2), x.detach().flatten(0, -2), factors.flatten(0, -2)
    random = None if random is None else random.reshape(x.shape)
    step = _step(x, block)
    for begin in range(0, len(x), step):
        rows = slice(begin, begin + step)
        pairs = _codes(x[rows], factors, block, begin, None if random is None else random[rows]).view(torch.int32)
        out[rows] = (pairs >> 12).bitwise_or_(pairs)
    return packed


def rounded_blocks(
    x: Tensor,
    factors: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    random: Tensor | None = None,
) -> Tensor:
    """Return x [..., R, C], each block multiplied by its factor, rounded and multiplied by its scale, in `dtype`.

    factors, random: see `packed_codes`; scales: the E4M3 scales in float32, one per block, too.
    """
    values = x.new_empty(x.shape, dtype=dtype)
    out, x, factors, scales = (
        values.flatten(0, -2),
        x.detach().flatten(0, -2),
        factors.flatten(0, -2),
        scales.flatten(0, -2),
    )
    random = None if random is None else random.reshape(x.shape)
    step = _step(x, block)
    for begin in range(0, len(x), step):
        rows = slice(begin, begin + step)
        codes = _codes(x[rows], factors, block, begin, None if random is None else random[rows])
        halves = (codes << 12).bitwise_or_(codes << 9).bitwise_and_(-0x7200)
        out[rows] = _times_scales(halves, scales, block, begin)
    return values


def decoded_blocks(packed: Tensor, scales: Tensor) -> Tensor:
    """Return value * scale in float32, [..., R, C], of packed codes [..., R, C / 2] in blocks of 1x16."""
    values = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=torch.float32)
    out, codes, scales = values.flatten(0, -2), packed.flatten(0, -2), e4m3_to_float(scales).flatten(0, -2)
    step = _step(out, (1, BLOCK))
    for begin in range(0, len(out), step):
        rows = slice(begin, begin + step)
        pairs = codes[rows].to(torch.int32, copy=True, memory_format=torch.contiguous_format)
        # both signs to where two float16 have them, then both magnitudes
        signs = (pairs * 0x01001000).bitwise_and_(-0x7FFF8000)
        halves = pairs.mul_(0x00200200).bitwise_and_(0x0E000E00).bitwise_or_(signs)
        out[rows] = _times_scales(halves, scales, (1, BLOCK), begin)
    return values


def _step(x: Tensor, block: tuple[int, int]) -> int:
    """Return how many rows of a matrix, in whole blocks, are worked on at a time."""
    return max(1, _TILE // (x.shape[1] * block[0])) * block[0]


def _codes(x: Tensor, factors: Tensor, block: tuple[int, int], begin: int, random: Tensor | None) -> Tensor:
    """Return the codes, int16 with the sign in bit 3, of x: rows of a matrix from row `begin` on."""
    integer, _, shift = _FORMS[x.dtype]
    fine = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    of_rows = factors[begin // block[0] : (begin + len(x)) // block[0], None, :, None]
    to_blocks(fine, block).mul_(of_rows)
    fine.abs_().clamp_(max=6.0)
    codes = _nearest(fine) if random is None else _random(fine, random)
    signs = (x.view(integer) >> shift).bitwise_and_(8).to(torch.int16)
    return codes.to(torch.int16).bitwise_or_(signs)


def _nearest(magnitudes: Tensor) -> Tensor:
    """Return the codes, int32, of magnitudes up to 6, and overwrite these."""
    coarse = magnitudes + _FROM_4
    codes = magnitudes.add_(_UP_TO_4).view(torch.int32).add_(_APART)
    return torch.minimum(codes, coarse.view(torch.int32), out=codes)


def _random(magnitudes: Tensor, random: Tensor) -> Tensor:
    """Return the codes, int32, of magnitudes up to 6, rounded up where the random number is below the fraction."""
    exponents = (magnitudes.view(torch.int32) >> 23).clamp_(127, 129)  # 127 and less: steps of 1/2; 129: of 2
    counts = magnitudes * (255 - exponents).bitwise_left_shift_(23).view(torch.float32)
    below = counts.floor()
    up = unit_interval(random).sub_(counts.sub_(below)).view(torch.int32).bitwise_right_shift_(31)  # -1 or 0
    return exponents.sub_(127).mul_(2).add_(below.to(torch.int32)).sub_(up)


def _times_scales(halves: Tensor, scales: Tensor, block: tuple[int, int], begin: int) -> Tensor:
    """Return float16 numbers, given as integers, in float32 and times their scales, both exact: rows of a matrix from
    `begin` on, whose scales are given."""
    values = halves.view(torch.float16).float()
    of_rows = scales[begin // block[0] : (begin + len(values)) // block[0], None, :, None]
    to_blocks(values, block).mul_(of_rows * 2.0**14)
    return values
