"""An independent emulation of the FP8 recipes: integers, float64 and numpy float32, written from the specifications.

Nothing here calls the library or a torch FP8 cast. A value of a format is found by searching the table of all values of
that format, so ties and subnormals are right by construction. Scale arithmetic is float32, as specified."""

from dataclasses import dataclass

import numpy as np
import torch

F32_MAX = float(np.finfo(np.float32).max)
OVERFLOW = {torch.float32: F32_MAX, torch.bfloat16: 3.3895313892515355e38, torch.float16: 65504.0}
"""What a scale that overflows becomes in the formats of 128-blocks: the largest number of the input's dtype."""


class Format:
    """One format: `values[code]` is the magnitude of code 0..n-1 in increasing order; the sign is one bit above."""

    def __init__(self, exponent_bits: int, mantissa_bits: int, largest: float, dtype: torch.dtype | None) -> None:
        bias = 2 ** (exponent_bits - 1) - 1
        self.sign = 1 << (exponent_bits + mantissa_bits)
        values = []
        for code in range(self.sign):
            exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
            fraction = mantissa / 2**mantissa_bits
            value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
            if value <= largest:
                values.append(value)
        self.values, self.max, self.dtype = np.array(values), largest, dtype
        self.nan_code = self.sign - 1

    def codes(self, v: np.ndarray) -> np.ndarray:
        """Round to the nearest value, ties to the even code; v must not exceed the largest."""
        magnitude = np.abs(np.where(np.isnan(v), 0.0, v)).astype(np.float64)
        above = np.clip(np.searchsorted(self.values, magnitude), 1, len(self.values) - 1)
        below = above - 1
        to_above, to_below = self.values[above] - magnitude, magnitude - self.values[below]
        nearest = np.where(to_above < to_below, above, below)
        nearest = np.where(to_above == to_below, np.where(above % 2 == 0, above, below), nearest)
        code = np.where(np.isnan(v), self.nan_code, nearest)
        return (code | np.where(np.signbit(v), self.sign, 0)).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """The float64 values of codes; the NaN code of an FP8 format gives NaN."""
        table = np.full(self.sign, np.nan)
        table[: len(self.values)] = self.values
        if len(self.values) < self.sign - 1:  # E5M2 has an infinity between its largest value and its NaNs
            table[len(self.values)] = np.inf
        return np.where(codes & self.sign, -1.0, 1.0) * table[codes & (self.sign - 1)]


E4M3 = Format(4, 3, 448.0, torch.float8_e4m3fn)
E5M2 = Format(5, 2, 57344.0, torch.float8_e5m2)


def block_amax(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The largest magnitude of each block in float32, NaN where there is one; the matrix is padded with zeros."""
    (rows, columns), (br, bc) = x.shape, block
    padded = np.pad(np.abs(x), ((0, -rows % br), (0, -columns % bc)))
    return padded.reshape(padded.shape[0] // br, br, -1, bc).max((1, 3)).astype(np.float32)


def per_element(values: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """Give every element the value of its block."""
    rows, columns = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    return values[rows[:, None], columns[None, :]]


def scale_of(
    amax: np.ndarray | float, fmt: Format, *, pow2: bool = False, overflow: float = F32_MAX, epsilon: float = 0.0
) -> np.ndarray:
    """fp8_max / amax in float32, with the exceptional cases of the specification."""
    amax = np.asarray(amax, np.float32)
    amax = np.where(np.isnan(amax), amax, np.maximum(amax, np.float32(epsilon)))
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.float32(fmt.max) / amax
    scale = np.where(np.isinf(scale), np.float32(overflow), scale)
    scale = np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), scale)
    return np.ldexp(np.float32(1), np.frexp(scale)[1] - 1) if pow2 else scale


def e8m0_of(amax: np.ndarray, fmt: Format) -> np.ndarray:
    """The biased exponent of the power of two at or above amax / fp8_max."""
    value = np.asarray(amax, np.float32) * np.float32(1.0 / fmt.max)
    mantissa, exponent = np.frexp(np.where(np.isfinite(value), value, 1).astype(np.float64))
    byte = np.clip(exponent - (mantissa == 0.5) + 127, 0, 254)
    byte = np.where(value == 0, 0, np.where(np.isinf(value), 254, byte))
    return np.where(np.isnan(value), 255, byte).astype(np.uint8)


@dataclass
class Quantized:
    """codes: FP8 bytes; stored: scale_inv (float32) or scale bytes per block; values: float64 decoded."""

    codes: np.ndarray
    stored: np.ndarray
    values: np.ndarray


def cast(x: np.ndarray, scale: np.ndarray | np.float32, fmt: Format) -> np.ndarray:
    """clamp(float32(x) * scale) rounded to the format, as codes."""
    with np.errstate(over="ignore", invalid="ignore"):
        v = (x.astype(np.float32) * scale).astype(np.float64)
    return fmt.codes(np.where(np.isnan(v), v, np.clip(v, -fmt.max, fmt.max)))


def quantize(
    x: np.ndarray, block: tuple[int, int], fmt: Format, kind: str, overflow: float = F32_MAX, epsilon: float = 0.0
) -> Quantized:
    """Quantize the blocks of a matrix. kind: "float32", "pow2" or "e8m0"."""
    amax = block_amax(x, block)
    if kind == "e8m0":
        stored = e8m0_of(amax, fmt)
        exponent = stored.astype(np.int64) - 127
        scale = np.where(stored == 255, np.nan, 2.0 ** (-exponent)).astype(np.float32)
        inverse = np.where(stored == 255, np.nan, 2.0**exponent)
    else:
        scale = scale_of(amax, fmt, pow2=kind == "pow2", overflow=overflow, epsilon=epsilon)
        stored = np.float32(1) / scale
        inverse = stored.astype(np.float64)
    codes = cast(x, per_element(scale, block, x.shape), fmt)
    return Quantized(codes, stored, fmt.decode(codes) * per_element(inverse, block, x.shape))


def per_tensor(x: np.ndarray, fmt: Format, *, pow2: bool = False, epsilon: float = 0.0) -> Quantized:
    """Quantize with one scale for the whole matrix."""
    block = (max(x.shape[0], 1), max(x.shape[1], 1))
    return quantize(x, block, fmt, "pow2" if pow2 else "float32", epsilon=epsilon)


def hard_values(size: int, seed: int) -> torch.Tensor:
    """Float32 numbers over the whole range: zeros of both signs, subnormals, ties, a huge outlier, equal runs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * torch.exp(3 * torch.randn(size, generator=generator))
    special = torch.tensor([0.0, -0.0, 1e-40, -3e-45, 448.0, -448.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 3e38, 1.0, 1.0])
    count = min(size // 2, len(special))
    x[torch.randperm(size, generator=generator)[:count]] = special[:count]
    return x
