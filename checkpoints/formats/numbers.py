"""How quantized files write numbers: elements and scales to float32 values, or to the fields of our storage, and back.

A function here maps the entries that a file has for a part of a matrix to what they stand for; which entries those are
is `views`' business. E2M1 comes two in a byte, the even element in the low half.

Scales and elements of our folders and of Hugging Face's alike are checked here, too: a scale that no quantization
gives makes every weight of its block meaningless, and a NaN among the eight-bit numbers spreads from there.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from te_models.kernels.quantize import e8m0_to_float, fp8_to_float, global_decode
from te_models.kernels.quantize.cpu import fields as cpu_fields

from ..io.box_reads import cut_rows
from ..io.errors import CheckpointError
from ..io.store import FileStore

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NO_CODE = 255


@functools.cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """Byte -> its two E2M1 values in `dtype`, as one integer: one look-up per byte."""
    values = [[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)]
    integer = torch.int16 if dtype.itemsize == 1 else torch.int64
    return torch.tensor(values, dtype=torch.float32, device="cpu").to(dtype).view(integer).flatten()


@functools.cache
def _codes_of_e4m3() -> Tensor:
    """E4M3 byte -> E2M1 code, _NO_CODE where E2M1 does not have the value."""
    codes = torch.full((256,), _NO_CODE, dtype=torch.uint8, device="cpu")
    bytes_of_e2m1 = torch.tensor(_E2M1, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn).view(torch.uint8)
    codes[bytes_of_e2m1.long()] = torch.arange(16, dtype=torch.uint8, device="cpu")
    return codes


NVFP4_RANGE = 448.0 * 6.0
"""amax / factor of an NVFP4 matrix: the largest E4M3 scale times the largest E2M1 value."""


def unpack_e2m1(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values [..., 2 n] of packed bytes [..., n] in float32, or in E4M3 (it holds all of them)."""
    return (
        _pairs(dtype).index_select(0, packed.view(torch.uint8).int().flatten()).view(dtype).view(*packed.shape[:-1], -1)
    )


def e4m3_to_packed(data: Tensor, name: str) -> Tensor:
    """Return E4M3 [..., C] as packed E2M1 codes [..., C / 2]; a value that E2M1 does not have is an error."""
    codes = _e2m1_codes(data)
    if not _are_codes(codes):
        raise CheckpointError(
            f"{name} has values that four bits do not hold, so it cannot be written as MXFP4; choose mxfp8-quantized"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def fits_e2m1(data: Tensor) -> bool:
    """Whether E2M1 has all of these E4M3 values."""
    return _are_codes(_e2m1_codes(data))


def _e2m1_codes(data: Tensor) -> Tensor:
    return _codes_of_e4m3().index_select(0, data.view(torch.uint8).int().flatten()).view(data.shape)


def _are_codes(codes: Tensor) -> bool:
    return codes.numel() == 0 or int(codes.max()) != _NO_CODE


def scale_to_float(stored: Tensor) -> Tensor:
    """Return scales as float32, whatever a file stores them as; a byte is a power of two."""
    if stored.dtype == torch.float8_e8m0fnu:
        stored = stored.view(torch.uint8)
    return e8m0_to_float(stored) if stored.dtype == torch.uint8 else fp8_to_float(stored)


def is_power_of_two(scales: Tensor) -> Tensor:
    """Whether each float32 scale is a power of two that a scale byte can be: 2^-127 .. 2^127."""
    mantissa, exponent = torch.frexp(scales)
    return (mantissa == 0.5) & (exponent >= -126) & (exponent <= 128)


def power_of_two_to_e8m0(scales: Tensor) -> Tensor:
    """Return the scale bytes of powers of two."""
    return (torch.frexp(scales).exponent + 126).to(torch.uint8)


def amax_of_factor(factor: Tensor) -> Tensor:
    """Return the amax that stands for a factor: float32 of any shape.

    Our decoding multiplies with 1 / (2688 / amax): the amax is one for which that is the factor, if there is one, and
    gives a neighbour of it otherwise (float32 division does not reach every number).
    """
    return _closest(factor * NVFP4_RANGE, lambda amax: amax / NVFP4_RANGE == factor, factor)


def factor_of_amax(amax: Tensor) -> Tensor:
    """Undo `amax_of_factor`, for factors that come from such a division; a matrix of zeros has the factor 1."""
    return torch.where(amax == 0, 1.0, amax / NVFP4_RANGE)


def amax_of_divisor(divisor: Tensor) -> Tensor:
    """Return the amax that stands for a divisor, as `amax_of_factor` does for its inverse."""
    whole = torch.full_like(divisor, NVFP4_RANGE)
    return _closest(whole / divisor, lambda amax: whole / amax == divisor, 1 / divisor)


def divisor_of_amax(amax: Tensor) -> Tensor:
    """Undo `amax_of_divisor`, for divisors that come from such a division; a matrix of zeros has the divisor 1."""
    return torch.where(amax == 0, 1.0, torch.full_like(amax, NVFP4_RANGE) / amax)


def _closest(guess: Tensor, restores: Callable[[Tensor], Tensor], factor: Tensor) -> Tensor:
    """Return a neighbour of `guess` that decodes as `factor`, and the one that `restores` the stored number if there
    are several; the latter, or the guess without one."""
    best, rank = guess, torch.zeros_like(guess)
    for step in (0, 1, -1, 2, -2, 3, -3):
        amax = (guess.contiguous().view(torch.int32) + step).view(torch.float32)
        own = (global_decode(amax) == factor).float() * 2 + restores(amax).float()
        best, rank = torch.where(own > rank, amax, best), torch.maximum(own, rank)
    return best


_PART = 1 << 18
_E8M0_NAN = 255


def check_scales(store: FileStore, names: Iterable[tuple[str, bool]]) -> None:
    """Read these scales and amaxes, each with whether it is `signed`; raise CheckpointError naming the first that no
    quantization gives."""
    for name, signed in names:
        for box in cut_rows(store.tensors[name].shape, 4 * _PART):
            check_scale_values(name, store.read(name, box), signed=signed)


def check_scale_values(name: str, scales: torch.Tensor, *, signed: bool = False) -> None:
    """Raise CheckpointError where these scales, stored as `name` or a part of it, hold a NaN, an infinity, a negative
    number or a zero. signed: scales of integers; they may be negative and zero.

    Scales stored as bytes are exponents (E8M0), in which 255 is NaN. Of scales in E4M3, and of amaxes, zeros are those
    of blocks and matrices that are zero.
    """
    zeros = scales.dtype == torch.float8_e4m3fn or name.endswith("_amax")
    for part in scales.flatten().split(_PART):
        if part.dtype in (torch.uint8, torch.float8_e8m0fnu):
            finite, wrong = part.view(torch.uint8) != _E8M0_NAN, False
        else:
            numbers = part.float()
            finite = torch.isfinite(numbers)
            wrong = not signed and bool((numbers < 0 if zeros else numbers <= 0).any())
        if not finite.all():
            raise CheckpointError(f"{name!r} has a scale that is NaN or infinite, so its weight has no values")
        if wrong:
            what = "negative" if zeros else "zero or negative"
            raise CheckpointError(f"{name!r} has a scale that is {what}, so its weight has no values")


def check_elements(name: str, data: memoryview, dtype: str) -> None:
    """Raise CheckpointError where these bytes of the tensor `name`, in F8_E4M3 or F8_E5M2, hold a NaN."""
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if dtype == "F8_E4M3":
        found = cpu_fields.has_nan(raw)
    else:
        found = bool(raw.view(torch.float8_e5m2).float().isnan().any())
    if found:
        raise CheckpointError(f"{name!r} holds a NaN among its quantized numbers, so its weight has no values")
