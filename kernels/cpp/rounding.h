// What operations that quantize have in common: rounding to FP8 number by number, and the magnitudes of blocks.
//
// INPUT and RESULT are the dtypes of what a library reads, `X`, and writes, `Y`.

#pragma once

#include "simd.h"

namespace te_models {

// A format of floating-point numbers: bits of its mantissa, exponent of its smallest normal number, largest number.
template <int mantissa, int least, int largest>
struct Format {
  static constexpr int kMantissa = mantissa;
  static constexpr uint32_t kLeast = uint32_t(127 + least) << 23;
  static constexpr float kLargest = float(largest);
  // 1.5 times a power of two, adding which rounds a number of this exponent, in float32, to nearest even
  static constexpr uint32_t kAbove = (uint32_t(23 - mantissa) << 23) | 0x00400000;
  INLINE static Words exponent(Words magnitude) { return larger(magnitude & 0x7F800000, all(kLeast)); }
  INLINE static Words limited(Floats magnitude) {
    return smaller(bits_of(magnitude), all(te_models::bits_of(kLargest)));
  }
};
using E4M3 = Format<3, -6, 448>;
using E5M2 = Format<2, -14, 57344>;
using E2M1 = Format<1, 0, 6>;

// Magnitudes as a format has them: the number, and its code. No NaN; an infinity is the largest number.
template <class F>
struct Rounded {
  Floats value;
  Words code;
  INLINE explicit Rounded(Floats magnitude) {
    const Words m = F::limited(magnitude), e = F::exponent(m), above = e + F::kAbove;
    const Floats sum = float_of(m) + float_of(above);
    value = sum - float_of(above);
    // quanta, of which a normal number has 2^mantissa or more, and the exponent's steps above the smallest
    constexpr int shift = 23 - F::kMantissa;
    code = (bits_of(sum) - above) + (e >> shift) - (F::kLeast >> shift);
  }
};

// stochastically: up where a random number, its upper 24 bits, is below the part of a quantum that is left
template <class F>
INLINE inline Floats drawn(Floats magnitude, Words random) {
  const Words m = F::limited(magnitude), e = F::exponent(m);
  constexpr uint32_t mantissa = uint32_t(F::kMantissa) << 23;
  const Floats quanta = float_of(m) * float_of((254u << 23) + mantissa - e);
  const Floats below = __builtin_convertvector(__builtin_convertvector(quanta, Integers), Floats);
  const Floats uniform = __builtin_convertvector(Integers(random >> 8), Floats) * 0x1p-24f;
  const Words up = Words(uniform < quanta - below) & te_models::bits_of(1.0f);
  return (below + float_of(up)) * float_of(e - mantissa);
}

INLINE inline Floats with_sign(Floats magnitude, Words sign) {
  return float_of(bits_of(magnitude) | (sign & 0x80000000));
}

constexpr float kLargest = std::numeric_limits<float>::max();

using Y = RESULT;

inline bool finite(float f) { return (bits_of(f) & 0x7F800000) != 0x7F800000; }
inline float with_sign(float magnitude, float sign) {
  return float_of((bits_of(magnitude) & 0x7FFFFFFF) | (bits_of(sign) & 0x80000000));
}
inline float clamped(float v, float limit) {  // a NaN stays
  v = v > limit ? limit : v;
  return v < -limit ? -limit : v;
}

template <bool e5m2>
inline float rounded_fp8(float v) {
  v = clamped(v, e5m2 ? 57344.0f : 448.0f);
  const float m = v * (e5m2 ? 0x1p21f : 0x1p20f);
  const float normal = m - (m - v);
  const float constant = e5m2 ? 0x1.8p7f : 0x1.8p14f;
  const float subnormal = (v + constant) - constant;
  return with_sign(std::fabs(v) < (e5m2 ? 0x1p-14f : 0x1p-6f) ? subnormal : normal, v);
}

// The largest magnitude of each column of `height` rows, or (together 2) of two neighbours.
template <int together>
inline void largest_of_columns(const X* x, int64_t height, int64_t C, uint32_t* to) {
  const int64_t count = C / together;
  for (int64_t r = 0; r < height; ++r) {
    const X* const row = x + r * C;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Words found = read_magnitudes<together>(row + together * i);
      store(to + i, r ? larger(load<Words>(to + i), found) : found);
    }
    for (; i < count; ++i) {
      uint32_t found = r ? to[i] : 0;
      for (int64_t c = together * i; c < together * (i + 1); ++c) found = std::max(found, X::magnitude(row[c]));
      to[i] = found;
    }
  }
}

// The largest magnitude of each block of a stripe: of `height` rows of C columns, in blocks of bc columns.
// columns: room for C words.
inline void largest_magnitudes(const X* x, int64_t height, int64_t C, int64_t bc, uint32_t* columns, uint32_t* m) {
  if (bc == 1) return largest_of_columns<1>(x, height, C, m);
  int64_t count = C, width = bc;
  if (C % bc == 0 && bc % 2 == 0) {
    largest_of_columns<2>(x, height, C, columns);
    width /= 2, count /= 2;
    // pairs of pairs: blocks of a vector or two would be reduced one by one
    for (; width % 2 == 0 && width <= kLanes; width /= 2, count /= 2)
#pragma omp simd
      for (int64_t i = 0; i < count / 2; ++i) {
        const uint32_t even = columns[2 * i], odd = columns[2 * i + 1];
        columns[i] = even > odd ? even : odd;
      }
  } else {
    largest_of_columns<1>(x, height, C, columns);
  }
  if (width == 1) {
    std::copy(columns, columns + count, m);
    return;
  }
  for (int64_t begin = 0; begin < count; begin += width) {
    const int64_t stop = std::min(begin + width, count);
    uint32_t found = 0;
    for (int64_t i = begin; i < stop; ++i) found = columns[i] > found ? columns[i] : found;
    *m++ = found;
  }
}

struct Scale {
  float before, after;  // multiplied with before the rounding, and after it
};

}  // namespace te_models
