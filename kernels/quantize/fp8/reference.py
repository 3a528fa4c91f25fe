"""The definition of FP8 quantization: float32 scale arithmetic, round to nearest even, saturate.

Formats: E4M3 (finite, max 448) and E5M2 (max 57344), arXiv 2209.05433. Scale kinds of a block:
"float32" fp8_max / amax; "pow2" the same rounded down to a power of two (DeepSeek-V3, arXiv 2412.19437);
"e8m0" the byte of the OCP microscaling specification v1.0, rounded up so that amax fits.

A block is (rows, columns) of the last two dimensions; leading dimensions are a batch, so a grouped weight [G, N, K]
is quantized by the same code as one matrix. Ragged edges are padded with zeros for amax only. Shapes: x [..., R, C],
block (br, bc), scales [..., ceil(R / br), ceil(C / bc)].
"""

import functools

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ...torch_versions import saturating_cast
from .blocks import blockwise_amax, blockwise_magnitudes, grid, once_per_block, times_blocks
from .cpu import fp8_to_float, look_up

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_EXPONENT_MASK = 0x7F800000
_MANTISSA_MASK = 0x007FFFFF


def scale_from_amax(
    amax: Tensor,
    fp8_dtype: torch.dtype,
    *,
    pow2: bool = False,
    epsilon: float = 0.0,
    overflow: float | None = None,
) -> Tensor:
    """Return the float32 factor to multiply with before the cast: fp8_max / max(amax, epsilon).

    amax 0, infinite or NaN gives 1; a factor that overflows gives `overflow` (None: float32's maximum); pow2 keeps the
    exponent only.
    True division of two tensors: a constant divided by a tensor is compiled as a reciprocal, one ulp off at times.
    """
    amax = amax.float()
    bounded = amax.clamp(min=epsilon) if epsilon else amax
    # `finfo`, not a float in a dictionary or a default argument: under dynamic=True the compiler makes a graph input of
    # every stored float, and torch 2.13 fails where two autograd functions of one graph use the same one.
    scale = torch.div(torch.full_like(bounded, torch.finfo(fp8_dtype).max), bounded)
    scale = torch.where(scale == float("inf"), torch.finfo(torch.float32).max if overflow is None else overflow, scale)
    scale = torch.where((bounded == 0) | ~torch.isfinite(bounded), 1.0, scale)
    if pow2:
        scale = (scale.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    return scale


def e8m0_from_amax(amax: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return the biased exponent byte (uint8) of the power of two at or above amax / fp8_max; NaN gives 255."""
    needed = amax.float() * (1.0 / torch.finfo(fp8_dtype).max)
    # what is up to 2^-127, a subnormal, is covered by byte 0; above it, a mantissa that is not 0 adds to the exponent
    bits = torch.threshold(needed, 2.0**-127, 0.0).view(torch.int32)
    byte = ((bits + _MANTISSA_MASK) >> 23).clamp(max=254)
    return torch.where(torch.isnan(amax), 255, byte).to(torch.uint8)


def _power_of_two(biased: Tensor) -> Tensor:
    """Return 2^(biased - 127) in float32 for an int32 exponent in 0..254; 0 is the subnormal 2^-127. Of other exponents
    the result is any number."""
    return (biased << 23).clamp(min=0x00400000).view(torch.float32)


def e8m0_to_float(byte: Tensor) -> Tensor:
    """Return 2^(byte - 127) in float32; 255 is NaN."""
    return torch.where(byte == 255, float("nan"), _power_of_two(byte.to(torch.int32)))


def e8m0_inverse(byte: Tensor) -> Tensor:
    """Return 2^(127 - byte) in float32; 255 is NaN."""
    return torch.where(byte == 255, float("nan"), _power_of_two(254 - byte.to(torch.int32)))


_e4m3_byte = functools.partial(e8m0_from_amax, fp8_dtype=torch.float8_e4m3fn)
_e5m2_byte = functools.partial(e8m0_from_amax, fp8_dtype=torch.float8_e5m2)


def block_scales(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, *, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return what to multiply each block of x with before the cast, float32, and what is stored of it."""
    if scale_kind == "e8m0" and x.dtype.itemsize == 2:
        magnitudes = blockwise_magnitudes(x, block)
        if magnitudes is not None:
            byte = _e4m3_byte if fp8_dtype is torch.float8_e4m3fn else _e5m2_byte
            return look_up(magnitudes, x.dtype, byte, e8m0_inverse)
    amax = once_per_block(blockwise_amax(x, block))
    if scale_kind == "e8m0":
        stored = once_per_block(e8m0_from_amax(amax, fp8_dtype))
        return once_per_block(e8m0_inverse(stored)), stored
    overflow = torch.finfo(x.dtype if x.dtype.itemsize <= 4 else torch.float32).max  # scales are float32
    scale = scale_from_amax(amax, fp8_dtype, pow2=scale_kind == "pow2", epsilon=epsilon, overflow=overflow)
    return once_per_block(scale), once_per_block(torch.div(torch.ones_like(scale), scale))


def quantize_blockwise(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, *, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As the public function: data and scales of x [..., R, C]."""
    if guard_or_false(x.numel() == 0):
        shape = (*x.shape[:-2], *grid(x.shape[-2], x.shape[-1], block))
        return x.to(fp8_dtype), x.new_empty(shape, dtype=torch.uint8 if scale_kind == "e8m0" else torch.float32)
    scale, stored = block_scales(x, block, fp8_dtype, scale_kind, epsilon=epsilon)
    return saturating_cast(times_blocks(x, scale, block), fp8_dtype), stored


def quantize_blockwise_both(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, *, epsilon: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the public function: (row_data, row_scale, col_data, col_scale)."""
    row = quantize_blockwise(x, block, fp8_dtype, scale_kind, epsilon=epsilon)
    column = quantize_blockwise(x, (block[1], block[0]), fp8_dtype, scale_kind, epsilon=epsilon)
    return (*row, *column)


def dequantize_blockwise(data: Tensor, stored: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return data * scale in `dtype`. data: [..., R, C] FP8; stored: its scales, float32 or uint8 exponents."""
    if guard_or_false(data.numel() == 0):
        return data.to(dtype)
    scale_inv = once_per_block(e8m0_to_float(stored)) if stored.dtype == torch.uint8 else stored
    return times_blocks(fp8_to_float(data), scale_inv, block).to(dtype)


def quantize_per_tensor(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return clamp(x * scale) as FP8. scale: float32, broadcastable to x. A NaN stays, infinities saturate."""
    return saturating_cast(x.float() * scale, fp8_dtype)


def dequantize_per_tensor(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Return data * scale_inv in `dtype`. scale_inv: float32, broadcastable to data."""
    return (fp8_to_float(data) * scale_inv).to(dtype)
