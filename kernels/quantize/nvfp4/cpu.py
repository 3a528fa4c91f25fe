"""E2M1 on CPU in eager mode (see `eager`), a few rows at a time: rounding, packing and decoding as `nvfp4` defines it.

A code comes of two sums, which float32 rounds as E2M1 does, to nearest and ties to even:

    m + (2^23 - 2)    in steps of 1/2 up to 2^23, where m is 2, and of 1 above: E2M1's steps up to 4
    m + (2^24 + 8)    in steps of 2: E2M1's steps from 4 on

As integers the bits of a float count its steps, and so do E2M1's codes. So less the bits that stand for code 0, the
first sum is the code up to 4 and the second from there on, and each of them is the smaller one where it holds.

Rounded stochastically, a number is counted in its own step, which its exponent tells, and a comparison with the random
number is the sign of a difference (exact, as both are multiples of the same power of two or less than 1 apart).

A code becomes a number as float16, whose exponent and mantissa it is at 2^-14 of the value, subnormals included.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..eager import eager_on_cpu
from ..fp8.blocks import to_blocks
from ..fp8.cpu import fp8_to_float
from ..random import unit_interval

_TILE = 1 << 18  # elements worked on at a time: a few calls, and buffers that stay in the cache
_UP_TO_4, _FROM_4 = 2.0**23 - 2, 2.0**24 + 8
_APART = 0x4B800000 - 0x4AFFFFFC  # of the bits that stand for code 0: those of 2^24 and of 2^23 - 2
_SIGN: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.bfloat16: (torch.int16, 12),
    torch.float16: (torch.int16, 12),
    torch.float32: (torch.int32, 28),
}
"""The dtypes that are served, each as integers, and the shift that brings the sign to bit 3."""


def serves(x: Tensor, factors: Tensor, block: tuple[int, int]) -> bool:
    """Whether x can be rounded here: it is computed with now, in whole blocks, and has no NaN, nor have its factors."""
    if not eager_on_cpu(x) or x.dtype not in _SIGN:
        return False
    whole = x.shape[-2] % block[0] == 0 and x.shape[-1] % block[1] == 0
    return whole and bool(factors.amax() <= torch.finfo(torch.float32).max)


def packed_codes(x: Tensor, factors: Tensor, block: tuple[int, int], random: Tensor | None = None) -> Tensor:
    """Return the packed codes [..., R, C / 2] of x [..., R, C], each block multiplied by its factor; C is even.

    factors: float32 [..., R / block[0], C / block[1]], positive and finite. random: int32 bits of x's shape to round
    stochastically with; None rounds to nearest.
    """
    packed = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
    out = packed.view(-1, packed.shape[-1])
    for rows, codes in _codes(x, factors, block, random):
        pairs = codes.view(torch.int32)
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

    factors, random: see `packed_codes`; scales: float8_e4m3fn, one per block, too.
    """
    values = torch.empty(x.shape, dtype=dtype)
    out, scales = values.view(-1, x.shape[-1]), fp8_to_float(scales).reshape(-1, scales.shape[-1])
    for rows, codes in _codes(x, factors, block, random):
        halves = (codes << 12).bitwise_or_(codes << 9).bitwise_and_(-0x7200)
        out[rows] = _times_scales(halves, scales, rows, block)
    return values


def decoded_blocks(packed: Tensor, scales: Tensor) -> Tensor:
    """Return value * scale in float32, [..., R, C], of packed codes [..., R, C / 2] in blocks of 1x16."""
    values = torch.empty((*packed.shape[:-1], 2 * packed.shape[-1]))
    out, codes = values.view(-1, values.shape[-1]), packed.reshape(-1, packed.shape[-1])
    scales = fp8_to_float(scales).reshape(-1, scales.shape[-1])
    for rows in _rows(out, 1):
        pairs = codes[rows].to(torch.int32, memory_format=torch.contiguous_format)
        # both signs to where two float16 have them, then both magnitudes
        signs = (pairs * 0x01001000).bitwise_and_(-0x7FFF8000)
        out[rows] = _times_scales(
            pairs.mul_(0x00200200).bitwise_and_(0x0E000E00).bitwise_or_(signs), scales, rows, (1, 16)
        )
    return values


def _rows(x: Tensor, height: int) -> Iterator[slice]:
    """Cut a matrix into parts of whole blocks."""
    step = max(1, _TILE // (x.shape[1] * height)) * height
    return (slice(begin, min(begin + step, len(x))) for begin in range(0, len(x), step))


def _codes(x: Tensor, factors: Tensor, block: tuple[int, int], random: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of x, all batches one after the other, and their codes, int16 with the sign in bit 3."""
    x, factors = x.detach().reshape(-1, x.shape[-1]), factors.reshape(-1, factors.shape[-1])
    random = None if random is None else random.reshape(x.shape)
    integer, shift = _SIGN[x.dtype]
    for rows in _rows(x, block[0]):
        part = x[rows]
        fine = part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        to_blocks(fine, block).mul_(_of_rows(factors, rows, block))
        fine.abs_().clamp_(max=6.0)
        codes = _nearest(fine) if random is None else _random(fine, random[rows])
        signs = (part.view(integer) >> shift).bitwise_and_(8).to(torch.int16)
        yield rows, codes.to(torch.int16).bitwise_or_(signs)


def _nearest(magnitudes: Tensor) -> Tensor:
    """Return the codes, int32, of magnitudes up to 6, which are overwritten."""
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


def _times_scales(halves: Tensor, scales: Tensor, rows: slice, block: tuple[int, int]) -> Tensor:
    """Return float16 numbers, given as integers, in float32 and times their scales; both are exact."""
    values = halves.view(torch.float16).float()
    to_blocks(values, block).mul_(_of_rows(scales, rows, block).mul(2.0**14))
    return values


def _of_rows(values: Tensor, rows: slice, block: tuple[int, int]) -> Tensor:
    """Return values per block, broadcastable to the blocks of these rows."""
    return values[rows.start // block[0] : rows.stop // block[0], None, :, None]
