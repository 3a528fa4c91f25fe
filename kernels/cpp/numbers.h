// The numbers that libraries read and write: bfloat16 and float32, as torch rounds.
//
// INPUT is the dtype of what a library reads, `X`.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace te_models {

inline uint32_t bits_of(float f) {
  uint32_t b;
  std::memcpy(&b, &f, 4);
  return b;
}
inline float float_of(uint32_t b) {
  float f;
  std::memcpy(&f, &b, 4);
  return f;
}

// is_number of what is written: it is no NaN, which then is not looked for
struct BFloat16 {
  static constexpr bool rounds = true;
  uint16_t bits;
  static uint32_t magnitude(BFloat16 x) { return uint32_t(x.bits & 0x7FFF) << 16; }
  static float read(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }
  template <bool is_number = false>
  static BFloat16 write(float f) {
    const uint32_t u = bits_of(f), rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    return {uint16_t(!is_number && (u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded)};
  }
};

struct Float32 {
  static constexpr bool rounds = false;
  float value;
  static uint32_t magnitude(Float32 x) { return bits_of(x.value) & 0x7FFFFFFF; }
  static float read(Float32 x) { return x.value; }
  template <bool is_number = false>
  static Float32 write(float f) {
    return {f};
  }
};

using X = INPUT;

}  // namespace te_models
