"""An independent emulation of NVFP4 (arXiv 2509.25149) and of the random bits of its stochastic rounding."""

from dataclasses import dataclass

import numpy as np

from .emulation import E4M3, F32_MAX, Format, block_amax, per_element

E2M1 = Format(2, 1, 6.0, None)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])


@dataclass
class Packed:
    """packed: two codes in a byte, the even one low; scales: E4M3 bytes; amax: float32; values: float64 decoded."""

    packed: np.ndarray
    scales: np.ndarray
    amax: np.float32
    values: np.ndarray


def global_encode(amax: np.float32) -> np.float32:
    """448 * 6 / amax in float32."""
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        return np.float32(min(np.float32(448 * 6) / amax, F32_MAX))


def quantize(x: np.ndarray, rows: int = 1, bits: np.ndarray | None = None) -> Packed:
    """Quantize blocks of rows x 16. bits: uint32 per element for stochastic rounding, None for ties to even."""
    block = (rows, 16)
    amax = np.abs(x).max().astype(np.float32)
    encode = global_encode(amax)
    decode = np.float32(1) / encode
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        wanted = np.clip(block_amax(x, block) * (encode * np.float32(1 / 6)), -448, 448)
        scales = E4M3.codes(wanted)
        factor = np.minimum(np.float32(1) / (E4M3.decode(scales).astype(np.float32) * decode), np.float32(F32_MAX))
        scaled = np.clip(x.astype(np.float32) * per_element(factor, block, x.shape), -6, 6)
    codes = E2M1.codes(scaled) if bits is None else stochastic_codes(scaled, bits)
    pairs = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    every_row = scales[np.arange(x.shape[0]) // rows]
    values = E2M1.decode(codes) * per_element(E4M3.decode(every_row), (1, 16), x.shape) * float(decode)
    return Packed(pairs[:, ::2] | (pairs[:, 1::2] << 4), every_row, amax, values)


def four_over_six(x: np.ndarray, rows: int, e4m3_max: int, squares: bool) -> Packed:
    """The better of two scales (arXiv 2512.02010); errors are float32: 16 columns in their order, rows by halves."""
    f32, block = np.float32, (rows, 16)
    amax = np.abs(x).max().astype(f32)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        encode = f32(1) if amax == 0 or not np.isfinite(amax) else f32(min(f32(6 * e4m3_max) / amax, F32_MAX))
        decode = f32(1) / encode
        down, across = -(-x.shape[0] // rows), -(-x.shape[1] // 16)
        whole = np.zeros((down * rows, across * 16), f32)
        whole[: x.shape[0], : x.shape[1]] = x
        tried = []
        for larger in (f32(1.5), f32(1)):
            scales = E4M3.codes(np.clip(block_amax(x, block) / f32(6) * encode * larger, -448, 448))
            wide = E4M3.decode(scales).astype(f32)
            factor = np.minimum(f32(1) / (wide * decode), f32(F32_MAX))
            codes = E2M1.codes(np.clip(whole * per_element(factor, block, whole.shape), -6, 6))
            values = E2M1.decode(codes).astype(f32) * per_element(wide, block, whole.shape) * amax / f32(6 * e4m3_max)
            error = (values - whole) ** 2 if squares else np.abs(values - whole)
            error = error.reshape(down, rows, across, 16)
            total = np.zeros((down, rows, across), f32)
            for column in range(16):
                total = total + error[..., column]
            while total.shape[1] > 1:
                half = total.shape[1] // 2
                total = total[:, :half] + total[:, half:]
            tried.append((codes, scales, total[:, 0]))
        four = tried[0][2] < tried[1][2]
    scales = np.where(four, tried[0][1], tried[1][1])[np.arange(x.shape[0]) // rows]
    codes = np.where(per_element(four, block, whole.shape), tried[0][0], tried[1][0])[: x.shape[0], : x.shape[1]]
    pairs = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    values = E2M1.decode(codes) * per_element(E4M3.decode(scales), (1, 16), x.shape) * float(decode)
    return Packed(pairs[:, ::2] | (pairs[:, 1::2] << 4), scales, amax, values)


def stochastic_codes(v: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Round magnitudes to the neighbour above where the upper 24 bits, a fraction of one, lie below the value's
    distance from the neighbour below in units of the gap."""
    magnitude = np.abs(np.where(np.isnan(v), 0.0, v)).astype(np.float64)
    below = np.clip(np.searchsorted(E2M1.values, magnitude, side="right") - 1, 0, 6)
    gap = E2M1.values[below + 1] - E2M1.values[below]
    up = (bits >> np.uint32(8)) * 2.0**-24 < (magnitude - E2M1.values[below]) / gap
    return ((below + up) | np.where(np.signbit(v), 8, 0)).astype(np.uint8)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, ties to even, kept in float32. NaN stays."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


def hadamard() -> np.ndarray:
    """The 16 x 16 matrix that rows of 16 values are multiplied by: the Sylvester matrix, signed by rows, over 4."""
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    return SIGNS[:, None] * h / 4


def rotate(x: np.ndarray) -> np.ndarray:
    """The random Hadamard transform along the last dimension, of bfloat16 values to bfloat16 values; the dimension is
    padded with zeros to a multiple of 16. The sum is exact: it is float32's where that sum is exact, too."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 16))).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        product = (padded.reshape(len(x), -1, 16)[..., None] * hadamard()).sum(-2)
        return to_bfloat16(product.reshape(padded.shape).astype(np.float32))


def philox(counter: list[np.ndarray], key: list[int]) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al. 2011) on uint64 arrays that hold 32-bit words."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(word, np.uint64) for word in counter]
    for i in range(10):
        k0, k1 = ((k + i * step) % 2**32 for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high = np.uint64(32)
        c = [(p1 >> high) ^ c[1] ^ np.uint64(k0), p1 & low, (p0 >> high) ^ c[3] ^ np.uint64(k1), p0 & low]
    return c


def random_bits(seed: int, step: int, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """uint32 per element: element i is word i % 4 of Philox at counter (i // 4, stream, step low, step high), whose key
    is the seed's two words. Negative numbers are taken in two's complement."""
    size = int(np.prod(shape))
    index = np.arange(-(-size // 4), dtype=np.uint64)
    rest = [np.full_like(index, word) for word in (stream, step % 2**32, (step >> 32) % 2**32)]
    words = philox([index, *rest], [seed % 2**32, (seed >> 32) % 2**32])
    return np.stack(words, -1).reshape(-1)[:size].reshape(shape).astype(np.uint32)
