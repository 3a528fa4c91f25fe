// The scales of FP8, and the rounding of a row by one of them.

#pragma once

#include "rounding.h"

namespace te_models {

inline float power_of_two(int32_t biased) { return float_of(uint32_t(std::max(biased << 23, 0x00400000))); }

enum Kind { kFloat32, kPow2, kE8m0 };

template <bool e5m2>
inline Scale fp8_scale(float amax, int kind, float epsilon, float overflow) {
  const float limit = e5m2 ? 57344.0f : 448.0f;
  if (kind == kE8m0) {
    const float needed = amax * float(1.0 / double(limit));
    const uint32_t bits = needed <= 0x1p-127f ? 0 : bits_of(needed);  // of NaN with a sum beyond int32_t
    const int32_t byte = std::min(int32_t((bits + 0x007FFFFF) >> 23), 254);
    const bool nan = amax != amax;
    const float none = std::numeric_limits<float>::quiet_NaN();
    return {nan ? none : power_of_two(254 - byte), nan ? none : power_of_two(byte)};
  }
  const float bounded = amax < epsilon ? epsilon : amax;
  float scale = limit / bounded;
  scale = scale == std::numeric_limits<float>::infinity() ? overflow : scale;
  scale = bounded == 0.0f || !finite(bounded) ? 1.0f : scale;
  if (kind == kPow2) scale = float_of(bits_of(scale) & 0x7F800000);
  return {scale, 1.0f / scale};
}

template <bool e5m2>
inline void fp8_scales(const uint32_t* m, int64_t count, int kind, float epsilon, float overflow, float* before,
                       float* after) {
  const auto of_kind = [=](int each) {  // a loop for each, of which vectors are made
#pragma omp simd
    for (int64_t b = 0; b < count; ++b) {
      const Scale scale = fp8_scale<e5m2>(float_of(m[b]), each, epsilon, overflow);
      before[b] = scale.before, after[b] = scale.after;
    }
  };
  kind == kE8m0 ? of_kind(kE8m0) : kind == kPow2 ? of_kind(kPow2) : of_kind(kFloat32);
}

template <bool e5m2>
using Fp8 = std::conditional_t<e5m2, E5M2, E4M3>;

// Numbers times one scale. Of a part that holds one that is not finite, all are rounded one by one.
template <bool e5m2>
inline void round_row(const X* from, Y* to, int64_t count, float scale) {
  constexpr int64_t part = 1024;
  const bool positive = scale > 0.0f && finite(scale);
  for (int64_t begin = 0; begin < count; begin += part) {
    const int64_t stop = std::min(begin + part, count);
    Words any{};
    int64_t c = begin;
    for (; positive && c + kLanes <= stop; c += kLanes) {
      const Words u = read_bits(from + c), magnitude = u & 0x7FFFFFFF;
      any = larger(any, magnitude);
      write<true>(to + c, with_sign(Rounded<Fp8<e5m2>>(float_of(magnitude) * scale).value, u));
    }
    if (largest_of(any) >= 0x7F800000) c = begin;
#pragma omp simd
    for (int64_t i = c; i < stop; ++i) to[i] = Y::write(rounded_fp8<e5m2>(X::read(from[i]) * scale));
  }
}

}  // namespace te_models
