"""An independent emulation of the recipes: float64, integers and tables, written from the specifications.

Nothing here calls the library or a torch FP8 cast. An FP8 value is found by searching the table of all values of its
format, so ties and subnormals are right by construction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

F32_MAX = float(np.finfo(np.float32).max)
BF16_MAX = 3.3895313892515355e38


class Format:
    """One FP8 format: `values[code]` is the magnitude of code 0..n-1 in increasing order."""

    def __init__(self, exponent_bits: int, mantissa_bits: int, largest: float, dtype: torch.dtype) -> None:
        bias = 2 ** (exponent_bits - 1) - 1
        values = []
        for code in range(128):
            exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
            fraction = mantissa / 2**mantissa_bits
            value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
            if value <= largest:
                values.append(value)
        self.values, self.max, self.dtype = np.array(values), largest, dtype
        self.nan_code = 0x7F

    def codes(self, v: np.ndarray) -> np.ndarray:
        """Round to the nearest value, ties to the even code; v must not exceed the largest."""
        magnitude = np.abs(np.where(np.isnan(v), 0.0, v)).astype(np.float64)
        above = np.clip(np.searchsorted(self.values, magnitude), 1, len(self.values) - 1)
        below = above - 1
        to_above, to_below = self.values[above] - magnitude, magnitude - self.values[below]
        nearest = np.where(to_above < to_below, above, below)
        nearest = np.where(to_above == to_below, np.where(above % 2 == 0, above, below), nearest)
        code = np.where(np.isnan(v), self.nan_code, nearest)
        return (code | (np.signbit(v) << 7)).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """The float64 values of codes; the NaN code gives NaN."""
        magnitude = codes & 0x7F
        table = np.full(128, np.nan)
        table[: len(self.values)] = self.values
        if len(self.values) < 127:  # E5M2 has an infinity between its largest value and its NaNs
            table[len(self.values)] = np.inf
        return np.where(codes & 0x80, -1.0, 1.0) * table[magnitude]


E4M3 = Format(4, 3, 448.0, torch.float8_e4m3fn)
E5M2 = Format(5, 2, 57344.0, torch.float8_e5m2)


def scale_of(amax: np.float32, fmt: Format, *, pow2: bool, overflow: float, epsilon: float = 0.0) -> np.float32:
    """fp8_max / amax in float32, with the exceptional cases of the specification."""
    amax = np.float32(max(amax, epsilon)) if not math.isnan(amax) else amax
    if amax == 0 or not math.isfinite(amax):
        return np.float32(1.0)
    with np.errstate(over="ignore"):
        scale = np.float32(fmt.max) / amax
    if math.isinf(scale):
        scale = np.float32(overflow)
    return np.float32(2.0 ** math.floor(math.log2(float(scale)))) if pow2 else scale


def e8m0_of(amax: np.float32, fmt: Format) -> int:
    """The biased exponent of the power of two at or above amax / fp8_max."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    value = np.float32(amax) * np.float32(1.0 / fmt.max)
    if value == 0:
        return 0
    mantissa, exponent = math.frexp(float(value))
    return min(max((exponent - 1 if mantissa == 0.5 else exponent) + 127, 0), 254)


@dataclass
class Quantized:
    """codes: FP8 bytes; stored: scale_inv (float32) or scale bytes per block; values: float64 decoded."""

    codes: np.ndarray
    stored: np.ndarray
    values: np.ndarray


def cast(x: np.ndarray, scale: np.float32, fmt: Format) -> np.ndarray:
    """clamp(float32(x) * scale) rounded to the format, as codes."""
    with np.errstate(over="ignore", invalid="ignore"):
        v = (x.astype(np.float32) * scale).astype(np.float64)
    return fmt.codes(np.where(np.isnan(v), v, np.clip(v, -fmt.max, fmt.max)))


def quantize(x: np.ndarray, block: tuple[int, int], fmt: Format, kind: str, overflow: float = F32_MAX) -> Quantized:
    """Quantize a matrix block by block. kind: "float32", "pow2" or "e8m0"."""
    rows, columns = x.shape
    br, bc = block
    grid = (-(-rows // br), -(-columns // bc))
    codes, values = np.zeros(x.shape, np.uint8), np.zeros(x.shape)
    stored = np.zeros(grid, np.uint8 if kind == "e8m0" else np.float32)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = (slice(i * br, (i + 1) * br), slice(j * bc, (j + 1) * bc))
            amax = np.abs(x[at]).max().astype(np.float32)
            if kind == "e8m0":
                byte = e8m0_of(amax, fmt)
                stored[i, j] = byte
                scale = np.float32(np.nan) if byte == 255 else np.float32(2.0 ** (127 - byte))
                inverse = math.nan if byte == 255 else 2.0 ** (byte - 127)
            else:
                scale = scale_of(amax, fmt, pow2=kind == "pow2", overflow=overflow)
                stored[i, j] = np.float32(1.0) / scale
                inverse = float(stored[i, j])
            codes[at] = cast(x[at], scale, fmt)
            values[at] = fmt.decode(codes[at]) * inverse
    return Quantized(codes, stored, values)


def per_tensor(x: np.ndarray, fmt: Format) -> Quantized:
    """Quantize with one scale for the whole matrix."""
    return quantize(x, (max(x.shape[0], 1), max(x.shape[1], 1)), fmt, "float32")


def operand(recipe: str, role: str, usage: str, x: torch.Tensor) -> np.ndarray:
    """The float64 values that the named recipe multiplies for role "x", "w" or "dy" in a usage."""
    data = x.detach().float().numpy()
    if recipe == "current":
        return per_tensor(data, E5M2 if role == "dy" else E4M3).values
    if recipe == "block":
        block = (128, 128) if role == "w" else (1, 128) if usage == "rowwise" else (128, 1)
        overflow = BF16_MAX if x.dtype == torch.bfloat16 else F32_MAX
        return quantize(data, block, E4M3, "pow2", overflow).values
    assert recipe == "mxfp8"
    return quantize(data, (1, 32) if usage == "rowwise" else (32, 1), E4M3, "e8m0").values


def hard_values(size: int, seed: int) -> torch.Tensor:
    """Float32 numbers over the whole range: zeros of both signs, subnormals, ties, a huge outlier, equal runs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * torch.exp(3 * torch.randn(size, generator=generator))
    special = torch.tensor([0.0, -0.0, 1e-40, -3e-45, 448.0, -448.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 3e38, 1.0, 1.0])
    count = min(size // 2, len(special))
    x[torch.randperm(size, generator=generator)[:count]] = special[:count]
    return x
