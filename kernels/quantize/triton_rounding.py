"""Device functions that quantization kernels share: rounding to FP8 and FP4, the scales of `reference`, random bits.

Values are float32; a code is the low byte of an int32. Rounding is integer arithmetic, the same on every device and
under the interpreter, except where NATIVE says that the hardware converts float32 to FP8 in one correctly rounded step
(compute capability 9.0 and above), several times cheaper. No function leaves a product to be added to: a compiler may
fuse the two into one rounding.
"""

# A kernel takes plain values for the constexpr parameters that choose its branches; triton's types know neither.
import struct

import torch
import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """The float32 bits of |x|. As integers they order like the magnitudes, a NaN above infinity, so an integer maximum
    keeps NaN; tl.max need not."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def clamp(x, limit: tl.constexpr):
    """Clamp to [-limit, limit]; NaN stays."""
    return tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def round_magnitude(bits, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round |x|, given as float32 bits, to the nearest value of a small format, ties to even; return its code.

    A normal result keeps MANTISSA of 23 bits: half of what is cut off is added, less one unless the kept part is odd.
    A subnormal result has a fixed step: adding a float32 whose last bit is that step rounds to it.
    """
    CUT: tl.constexpr = 23 - MANTISSA
    half_less_one: tl.constexpr = (1 << (CUT - 1)) - 1
    normal = ((bits + half_less_one + ((bits >> CUT) & 1)) >> CUT) - ((127 - BIAS) << MANTISSA)
    step_exponent: tl.constexpr = 1 - BIAS - MANTISSA
    shifter: tl.constexpr = 2.0 ** (23 + step_exponent)
    shifter_bits: tl.constexpr = (127 + 23 + step_exponent) << 23
    subnormal = (bits.to(tl.float32, bitcast=True) + shifter).to(tl.int32, bitcast=True) - shifter_bits
    return tl.where(bits < (128 - BIAS) << 23, subnormal, normal)


@triton.jit
def encode_e4m3(x):
    """Codes of float32 values in [-448, 448] or NaN."""
    bits = magnitude_bits(x)
    code = tl.where(bits > 0x7F800000, 0x7F, round_magnitude(bits, 3, 7))
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def encode_e5m2(x):
    """Codes of float32 values in [-57344, 57344] or NaN."""
    bits = magnitude_bits(x)
    code = tl.where(bits > 0x7F800000, 0x7F, round_magnitude(bits, 2, 15))
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def to_fp8(x, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Clamp and round float32 to FP8; returns uint8 codes."""
    if E4M3:
        x = clamp(x, 448.0)
        if NATIVE:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return encode_e4m3(x).to(tl.uint8)
    x = clamp(x, 57344.0)
    if NATIVE:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return encode_e5m2(x).to(tl.uint8)


@triton.jit
def with_sign(value, negative):
    """Set the sign bit where `negative` is 1. Triton's minus subtracts from zero and loses a zero's sign."""
    return (value.to(tl.int32, bitcast=True) | (negative << 31)).to(tl.float32, bitcast=True)


@triton.jit
def from_e4m3(code):
    """The float32 values of E4M3 codes (int32, 0..255)."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return with_sign(value, code >> 7)


@triton.jit
def from_e5m2(code):
    """The float32 values of E5M2 codes (int32, 0..255): the upper byte of a float16."""
    return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def from_fp8(code, E4M3: tl.constexpr):
    """The float32 values of FP8 codes (uint8)."""
    if E4M3:
        return from_e4m3(code.to(tl.int32))
    return from_e5m2(code.to(tl.int32))


@triton.jit
def encode_e2m1(x):
    """Codes 0..15 of float32 values in [-6, 6], ties to even; a NaN has code 7."""
    bits = magnitude_bits(x)
    code = round_magnitude(bits, 1, 1) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    return tl.where(bits > 0x7F800000, 7, code)


@triton.jit
def encode_e2m1_stochastic(x, random):
    """Codes 0..15 of float32 values in [-6, 6], rounded up with a probability equal to the fraction, exact to 2^-24.

    random: int32 bits. A magnitude is a multiple of its step plus a fraction of it; codes count the steps.
    """
    magnitude = tl.abs(x)
    below_2, below_4 = magnitude < 2.0, magnitude < 4.0
    ratio = magnitude * tl.where(below_2, 2.0, tl.where(below_4, 1.0, 0.5))
    whole = ratio.to(tl.int32)
    uniform = ((random >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
    up = (uniform < ratio - whole.to(tl.float32)).to(tl.int32)
    code = whole + up + tl.where(below_2, 0, tl.where(below_4, 2, 4))
    code = code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    return tl.where(magnitude_bits(x) > 0x7F800000, 7, code)


@triton.jit
def from_e2m1(code):
    """The float32 values of codes 0..15 (int32)."""
    magnitude = code & 7
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return with_sign(value, code >> 3)


@triton.jit
def scale_of_amax(bits, largest: tl.constexpr, epsilon_bits, overflow: tl.constexpr):
    """`reference.scale_from_amax` for an amax given as float32 bits."""
    # an integer maximum keeps NaN and infinity
    bits = tl.maximum(bits, epsilon_bits)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.full(amax.shape, largest, tl.float32), amax)
    scale = tl.where(scale == float("inf"), overflow, scale)
    return tl.where((bits == 0) | (bits >= 0x7F800000), 1.0, scale)


@triton.jit
def pow2_of_amax(bits, E4M3: tl.constexpr, epsilon_bits, overflow: tl.constexpr):
    """The biased exponent of `reference.scale_from_amax(..., pow2=True)`, without a division.

    Both maxima are 1.75 times a power of two, 2^8 and 2^15: the quotient's exponent is that one's less amax's, and one
    less again where amax's significand is above 1.75. A subnormal amax always overflows. overflow: biased exponent.
    """
    bits = tl.maximum(bits, epsilon_bits)
    largest_exponent: tl.constexpr = 8 if E4M3 else 15
    above = ((bits & 0x007FFFFF) > 0x00600000).to(tl.int32)
    biased = 254 + largest_exponent - (bits >> 23) - above
    biased = tl.where(biased > 254, overflow, biased)
    return tl.where((bits == 0) | (bits >= 0x7F800000), 127, biased)


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def nvfp4_global_encode(amax):
    """`nvfp4.reference.global_encode` for float32 amaxes."""
    bits = magnitude_bits(amax)
    encode = tl.div_rn(tl.full(amax.shape, 2688.0, tl.float32), amax)
    encode = tl.where(encode == float("inf"), 3.4028234663852886e38, encode)
    return tl.where((bits == 0) | (bits >= 0x7F800000), 1.0, encode)


@triton.jit
def power_of_two(biased):
    """2^(biased - 127) in float32 for an int32 exponent in 0..254; 0 is the subnormal 2^-127."""
    return tl.where(biased == 0, 0x00400000, biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_of_amax(bits, one_over_largest: tl.constexpr):
    """`reference.e8m0_from_amax` for an amax given as float32 bits; int32 bytes."""
    scaled = (bits.to(tl.float32, bitcast=True) * one_over_largest).to(tl.int32, bitcast=True)
    exponent, mantissa = scaled >> 23, scaled & 0x007FFFFF
    up = tl.where(exponent == 0, mantissa > 0x400000, mantissa > 0).to(tl.int32)
    byte = tl.minimum(exponent + up, 254)
    return tl.where(bits > 0x7F800000, 255, byte)


@triton.jit
def from_e8m0(byte):
    """2^(byte - 127) in float32; 255 is NaN."""
    return tl.where(byte == 255, float("nan"), power_of_two(tl.minimum(byte, 254)))


@triton.jit
def inverse_of_e8m0(byte):
    """2^(127 - byte) in float32; 255 is NaN."""
    return tl.where(byte == 255, float("nan"), power_of_two(254 - tl.minimum(byte, 254)))


def float32_bits(value: float) -> int:
    """Return the bits of a nonnegative value rounded to float32."""
    # not by way of a tensor: under `torch.set_default_device` it would be on the GPU, and the host wait for it
    return struct.unpack("<i", struct.pack("<f", value))[0]


def native_fp8(device: torch.device) -> bool:
    """Whether the device converts float32 to FP8 with one correct rounding."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def random_tile(
    key_ptr, stream, first_row, first_column, width, A: tl.constexpr, B: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return int32 bits [A, B] for the elements of a tile at (first_row, first_column) of rows of `width` elements.

    Four neighbours share a counter. ALIGNED: first_column and width are multiples of 4, so every four of a row do;
    otherwise each element draws all four words and keeps its own.
    """
    seed, step = tl.load(key_ptr), tl.load(key_ptr + 1)
    row = first_row + tl.arange(0, A).to(tl.int64)
    if ALIGNED:
        quad = row[:, None] * (width // 4) + (first_column // 4 + tl.arange(0, B // 4))[None, :]
    else:
        index = row[:, None] * width + (first_column + tl.arange(0, B))[None, :]
        quad = index >> 2
    c0 = (quad & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros_like(c0)
    c1 = zero + (stream.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + (step & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    if ALIGNED:
        bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (A, B))
    else:
        word = index & 3
        bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return bits.to(tl.int32, bitcast=True)
