"""The definition of NVFP4: E2M1 values, one E4M3 scale per 16 of them, one float32 amax per matrix (arXiv 2509.25149).

    global_encode = 448 * 6 / amax                       (0, infinite, NaN: 1; overflow: the largest float32)
    scale         = e4m3(clamp(block_amax * (global_encode / 6)))
    value         = e2m1(clamp(x / (scale / global_encode)))
    decoded       = value * scale / global_encode

E2M1 has 0, .5, 1, 1.5, 2, 3, 4, 6 with a sign: codes 0..7, the sign in bit 3. Two codes share a byte, the even element
in the low half. There is no NaN: a block with one has the scale NaN (its codes, and only they, are of no meaning; a NaN
element has code 7, as hardware conversion gives). An infinity saturates.

Shapes: x [..., R, C] (leading dimensions are a batch of matrices), packed uint8 [..., R, ceil(C / 2)], scales
float8_e4m3fn [..., R, ceil(C / 16)], amax float32 [...].
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...torch_versions import saturating_cast
from ..fp8 import blocks
from ..fp8.cpu import fp8_to_float
from ..random import random_bits, unit_interval

BLOCK = 16
# Literals 6.0 (largest E2M1) and 448.0 (largest E4M3) below: under dynamic=True a stored float becomes an input of the
# graph, and a second autograd function in it cannot take that (torch 2.13).


def global_decode(amax: Tensor, e4m3_max: int = 448) -> Tensor:
    """Return the float32 factor that decoding multiplies with, for amaxes of any shape. e4m3_max: the largest scale
    factor of a block, 448 or (`four_over_six`) 256."""
    encode = global_encode(amax, e4m3_max)
    return torch.div(torch.ones_like(encode), encode)


def global_encode(amax: Tensor, e4m3_max: int = 448) -> Tensor:
    """Return the float32 factor that encoding multiplies with, see `global_decode`."""
    encode = torch.div(torch.full_like(amax, 256.0 * 6.0 if e4m3_max == 256 else 448.0 * 6.0), amax)
    encode = torch.where(encode == float("inf"), torch.finfo(torch.float32).max, encode)
    return torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, encode)


def broadcast_to_blocks(values: Tensor, x: Tensor) -> Tensor:
    """Make a value per matrix [...] broadcastable to blocks [..., r, c]; one of x's rank already is."""
    return values if values.dim() == x.dim() else values[..., None, None]


def nvfp4_block_scales(block_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of every block its E4M3 scale, the same in float32, and the float32 factor to multiply x with.

    block_amax: [..., blocks down, blocks across]; amax: as for `quantize_nvfp4`.
    """
    encode = broadcast_to_blocks(global_encode(amax), block_amax)
    decode = torch.div(torch.ones_like(encode), encode)
    scales = blocks.once_per_block(saturating_cast(block_amax * (encode * (1.0 / 6.0)), torch.float8_e4m3fn))
    wide = fp8_to_float(scales)
    divisor = wide * decode
    return scales, wide, torch.div(torch.ones_like(divisor), divisor).clamp(max=torch.finfo(torch.float32).max)


def _rounded(v: Tensor, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round magnitudes up to 6: return (multiples of the step there, that step), both float32.

    The steps are 1/2 below 2, 1 below 4, then 2; in multiples of its step a value has the parity of its code, so ties
    go to the even one. With random bits it is rounded up with a probability equal to the fraction, exact to 2^-24.
    """
    magnitude = v.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    ratio = magnitude * torch.where(magnitude < 2, 2.0, torch.where(magnitude < 4, 1.0, 0.5))
    if bits is None:
        return ratio.round(), step
    below = ratio.floor()
    return below + (unit_interval(bits) < ratio - below).float(), step


def encode_e2m1(v: Tensor, bits: Tensor | None = None) -> Tensor:
    """Return the codes (uint8) of float32 values in [-6, 6]; bits: int32, or None for round to nearest even."""
    if bits is None:
        m = v.abs()
        # codes counted in each of the three steps: the count is the code where its step holds, and larger elsewhere
        code = torch.minimum(torch.minimum((m * 2.0).round(), m.round() + 2.0), (m * 0.5).round() + 4.0)
    else:
        multiple, step = _rounded(v, bits)
        code = multiple + torch.where(step < 1, 0.0, torch.where(step < 2, 2.0, 4.0))
    # a separate sign bit, also on zeros; -0.0 < 0 is false
    code = torch.where(v.view(torch.int32) < 0, code + 8.0, code)
    # not `isnan`: Inductor's C++ backend computes that one element at a time (torch 2.13)
    return torch.where(v != v, 7.0, code).to(torch.uint8)


def decode_e2m1(code: Tensor) -> Tensor:
    """Return the float32 values of codes 0..15."""
    magnitude = (code & 7).float()
    value = torch.where(magnitude < 4, magnitude * 0.5, torch.where(magnitude < 6, magnitude - 2, 2 * magnitude - 8))
    return torch.where(code > 7, -value, value)


def round_e2m1(v: Tensor, bits: Tensor | None = None) -> Tensor:
    """Return `decode_e2m1(encode_e2m1(v, bits))` without making codes; NaN stays."""
    multiple, step = _rounded(v, bits)
    return torch.copysign(multiple * step, v)


def block_shape(block_rows: int) -> tuple[int, int]:
    if block_rows not in (1, BLOCK):
        raise ValueError(f"block_rows is {block_rows}; allowed: 1, {BLOCK}")
    return block_rows, BLOCK


def quantize_nvfp4(
    x: Tensor, *, block_rows: int = 1, amax: Tensor | None = None, key: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """As the public function: (packed, scales, amax) of x [..., R, C]."""
    block = block_shape(block_rows)
    rows, columns = x.shape[-2:]
    amax = blocks.amax(x) if amax is None else amax
    if x.numel() == 0:
        packed = x.new_empty((*x.shape[:-1], -(-columns // 2)), dtype=torch.uint8)
        return packed, x.new_empty((*x.shape[:-1], -(-columns // BLOCK)), dtype=torch.float8_e4m3fn), amax
    scales, _, factor = nvfp4_block_scales(blocks.once_per_block(blocks.blockwise_amax(x, block)), amax)
    bits = None if key is None else random_bits(key, stream, x.shape)
    scaled = x.float() * blocks.per_element(blocks.once_per_block(factor), block, rows, columns)
    packed = pack(encode_e2m1(scaled.clamp(-6.0, 6.0), bits))
    # FP8 tensors cannot be indexed everywhere; their bytes can
    scales = blocks.repeat(scales.view(torch.uint8), -2, block_rows, rows).view(torch.float8_e4m3fn)
    return packed, scales.contiguous(), amax


def pack(codes: Tensor) -> Tensor:
    """Put two codes in a byte, the even one in the low half: [..., C] -> [..., ceil(C / 2)]."""
    if not statically_known_true(codes.shape[-1] % 2 == 0):
        codes = F.pad(codes, (0, codes.shape[-1] % 2))
    # codes first, then pairs: fused, every other element is computed by itself, without vectors (three times slower)
    pairs = blocks.once_per_block(codes).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Undo `pack`: [..., ceil(C / 2)] -> [..., C] with C = columns."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :columns]


def decode_blocks(packed: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Return value * scale in float32, exact, without the factor of the whole matrix: [..., R, C]."""
    values = decode_e2m1(unpack(packed, columns))
    if values.numel() == 0:
        return values
    return values * blocks.repeat(blocks.once_per_block(scales.float()), -1, BLOCK, columns)


def dequantize_nvfp4(packed: Tensor, scales: Tensor, amax: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """Return [..., R, C] in `dtype`, C = columns; amax as in `quantize_nvfp4`, per matrix or per row, or None for 1 in
    place of its factor."""
    return times_global(decode_blocks(packed, scales, columns), amax, dtype)


def times_global(values: Tensor, amax: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what `decode_blocks` gives times the factor of each matrix: see `dequantize_nvfp4`."""
    return values.to(dtype) if amax is None else (values * broadcast_to_blocks(global_decode(amax), values)).to(dtype)


def rounding_bits(x: Tensor, block: tuple[int, int], key: Tensor, stream: int) -> Tensor:
    """Return the random bits of the elements of x: for blocks down the rows, the bits of the transpose."""
    return random_bits(key, stream, x.shape) if block[1] == BLOCK else random_bits(key, stream, x.mT.shape).mT


def round_nvfp4(
    x: Tensor,
    dtype: torch.dtype,
    *,
    block: tuple[int, int] = (1, BLOCK),
    amax: Tensor | None = None,
    key: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantize and decode at once, no codes made: return (value * scale in `dtype`, x's shape, and amax).

    block: (1, 16), (16, 16), or (16, 1). The last gives what quantizing the transpose by (1, 16) does, in x's
    orientation and with its random bits. The values are exact in bfloat16; `global_decode(amax)` is left to multiply
    with.
    """
    amax = blocks.amax(x) if amax is None else amax
    if x.numel() == 0:
        return x.to(dtype), amax
    rows, columns = x.shape[-2:]
    scales, _, factor = nvfp4_block_scales(blocks.once_per_block(blocks.blockwise_amax(x, block)), amax)
    bits = None if key is None else rounding_bits(x, block, key, stream)
    scaled = x.float() * blocks.per_element(blocks.once_per_block(factor), block, rows, columns)
    values = round_e2m1(scaled.clamp(-6.0, 6.0), bits)
    return (values * blocks.per_element(blocks.once_per_block(scales.float()), block, rows, columns)).to(dtype), amax
