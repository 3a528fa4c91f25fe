// Moments in few bits: `layers/optimizers/moments.py` defines them, `quantize/hashed.py` the random bits.
//
// A block is 128 numbers; the last one may have fewer, and counts as filled up with zeros.

#pragma once

#include "fp8.h"
#include "e4m3.h"

namespace te_models {

constexpr int64_t kBlock = 128;

inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The bits of the magnitudes of a block between which all others lie.
struct Range {
  uint32_t least, largest;
  bool nan() const { return largest > kInfinity; }
  Scale scale() const { return fp8_scale<false>(float_of(largest), kFloat32, 0.0f, kLargest); }
  // whether every number of the block is a normal one in E4M3
  bool normal(Scale s) const { return float_of(least) * s.before >= 0x1p-6f && largest < kInfinity; }
};

// Copy `count` values of a block, or their roots, and fill it up with zeros.
template <bool root>
inline Range read_block(const float* values, int64_t count, float* x) {
  uint32_t least = kInfinity, largest = 0;
#pragma omp simd reduction(max : largest) reduction(min : least)
  for (int64_t i = 0; i < count; ++i) {
    x[i] = root ? std::sqrt(values[i]) : values[i];
    const uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFF;
    largest = std::max(largest, magnitude), least = std::min(least, magnitude);
  }
  for (int64_t i = count; i < kBlock; ++i) x[i] = 0.0f;
  return {count < kBlock ? 0 : least, largest};
}

// a number times its block's scale, and a random number in [0, 2^16) -> the byte of an E4M3 number; square: the mean of
// the square is kept, not 0. In units of the quantum, which is exact, the number below is a whole one, `below`.
// In integers where it can be: a compiler makes three branches of a limit on a float, and a vector computes them all.
template <bool square>
inline int32_t code(float x, float scale, int32_t random) {
  const float uniform = float(random) * 0x1p-16f;
  const uint32_t u = bits_of(x * scale);
  const int32_t unlimited = int32_t(u & 0x7FFFFFFF), magnitude = unlimited < 0x43E00000 ? unlimited : 0x43E00000;
  const int32_t exponent = (magnitude > 0x3C800000 ? magnitude : 0x3C800000) >> 23;
  const float m = float_of(uint32_t(magnitude)) * float_of(uint32_t(257 - exponent) << 23);
  const int32_t below = int32_t(m);
  const float k = float(below);
  const float missing = square ? uniform * (k + k + 1.0f) - (m * m - k * k) : uniform - (m - k);  // negative: up
  const int32_t positive = square ? (below - 1) & -magnitude : 0;  // negative: up, too
  const int32_t up = (int32_t(bits_of(missing)) | positive) >> 31;
  return (below + exponent * 8 - 968 - up) | int32_t(u >> 24 & 0x80);
}

// The same of numbers that are normal in E4M3, whose leading bits of the mantissa are those of float32's: what comes
// after them is compared as a whole number, or by its square in units of the quantum, of which there are 8 to 16.
template <bool square>
inline int32_t normal_code(float x, float scale, int32_t random) {
  const uint32_t u = bits_of(x * scale);
  const int32_t unlimited = int32_t(u & 0x7FFFFFFF), magnitude = unlimited < 0x43E00000 ? unlimited : 0x43E00000;
  int32_t missing = (random << 4) - (magnitude & 0x000FFFFF);
  if (square) {
    const uint32_t units = uint32_t(magnitude & 0x007FFFFF) | 0x41000000;
    const float m = float_of(units), k = float_of(units & 0xFFF00000);
    missing = int32_t(bits_of(float(random) * (k * 0x1p-15f + 0x1p-16f) - (m * m - k * k)));
  }
  const int32_t sign = square ? 0 : int32_t(u >> 24 & 0x80);  // a root has none
  return ((magnitude >> 20) - 960 - (missing >> 31)) | sign;
}

// a float32 number's word, and 16 random bits -> the word of a bfloat16 number; an infinity stays
inline uint16_t rounded_up(uint32_t word, uint32_t bits) {
  return uint16_t((word + ((word & 0x7F800000) == 0x7F800000 ? 0 : bits)) >> 16);
}

// Where the moments of a block go, and what rounds them: of numbers and roots with their scales.
struct Stored {
  uint8_t *first, *second;
  float *first_scale, *second_scale;
};

inline void encode_block(const float* x, const float* y, Range first, Range second, uint32_t counter, uint32_t k0,
                         uint32_t k1, Stored to) {
  const Scale of_first = first.scale(), of_second = second.scale();
  *to.first_scale = of_first.after, *to.second_scale = of_second.after;
  const float before = of_first.before, before_second = of_second.before;
  int32_t codes[kBlock], codes_second[kBlock];
  if (first.normal(of_first) && second.normal(of_second)) {
#pragma omp simd
    for (int32_t i = 0; i < int32_t(kBlock); ++i) {
      const uint32_t bits = mixed(mixed((counter + uint32_t(i)) ^ k0) + k1);
      codes[i] = normal_code<false>(x[i], before, int32_t(bits & 0xFFFF));
      codes_second[i] = normal_code<true>(y[i], before_second, int32_t(bits >> 16));
    }
  } else {
#pragma omp simd
    for (int32_t i = 0; i < int32_t(kBlock); ++i) {
      const uint32_t bits = mixed(mixed((counter + uint32_t(i)) ^ k0) + k1);
      codes[i] = code<false>(x[i], before, int32_t(bits & 0xFFFF));
      codes_second[i] = code<true>(y[i], before_second, int32_t(bits >> 16));
    }
  }
#pragma omp simd
  for (int32_t i = 0; i < int32_t(kBlock); ++i) to.first[i] = uint8_t(codes[i]);
#pragma omp simd
  for (int32_t i = 0; i < int32_t(kBlock); ++i) to.second[i] = uint8_t(codes_second[i]);
}

}  // namespace te_models
