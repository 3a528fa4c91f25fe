// Numbers of E4M3 and the bytes that stand for them, and which bytes are NaN.

#pragma once

#include "rounding.h"

namespace te_models {

constexpr uint32_t kInfinity = 0x7F800000;

inline uint32_t distance(float decoded, float x) { return bits_of(decoded - x) & 0x7FFFFFFF; }

inline int32_t e4m3_byte(float v) {  // of a number that E4M3 has
  const uint32_t u = bits_of(v), magnitude = u & 0x7FFFFFFF;
  const int32_t normal = int32_t(magnitude >> 20) - 960, subnormal = int32_t(std::fabs(v) * 512.0f);
  return (magnitude < 0x3C800000 ? subnormal : normal) | int32_t(u >> 24 & 0x80);
}

inline float e4m3_magnitude(uint32_t magnitude) {  // of a byte without its sign that is no NaN
  const uint32_t small = magnitude < 8 ? 0xFFFFFFFF : 0;
  // a subnormal number as the mantissa of one in [2^-6, 2^-5), from which 2^-6 is taken away again
  return float_of((magnitude << 20) + 0x3C000000 + (small & 0x00800000)) - float_of(small & 0x3C800000);
}

inline float e4m3_value(int32_t byte) {
  const uint32_t magnitude = byte & 0x7F, none = magnitude == 0x7F ? 0x7FC00000 : 0;
  return float_of(bits_of(e4m3_magnitude(magnitude)) | none | uint32_t(byte & 0x80) << 24);
}

// whether one of these bytes is NaN
inline bool has_nan(const uint8_t* bytes, int64_t size) {
  uint8_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < size; ++i) {
    const uint8_t magnitude = bytes[i] & 0x7F;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest == 0x7F;
}

}  // namespace te_models
