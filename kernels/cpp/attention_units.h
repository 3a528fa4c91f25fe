// What flash attention computes in vectors: products of units, powers of two, transposition, rounding.
//
// A unit is what one instruction multiplies in a lane and adds up: a float, or with AVX512_BF16 two neighbouring
// bfloat16 values of the sum, whose products are added to a float32.

#pragma once

#include <cstdlib>
#include <memory>

#include "simd.h"

namespace te_models {

#if defined(__AVX512BF16__) && defined(WIDE) && !defined(FLOATS)
constexpr bool kPairs = X::rounds;
inline Floats dot(Floats a, Floats b, Floats c) {
  if constexpr (kPairs) return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
  else return fma(a, b, c);
}
// bfloat16 of two vectors side by side: lane i has a[i] in its low half and b[i] in its high half
inline Floats paired(Floats a, Floats b) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a)));
}
// bfloat16 of one vector, or the vector as it is where a unit is a float
inline void store_values(float* p, Floats v) {
  if constexpr (kPairs) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
  else store(p, v);
}
// pairs of two rows in memory
inline Floats columns(const X* row, const X* next) {
  if constexpr (kPairs) {
    const __m512i high = _mm512_castps_si512(widened(next));
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
    return _mm512_castsi512_ps(_mm512_or_si512(low, high));
  } else {
    return widened(row);
  }
}
#else
constexpr bool kPairs = false;
inline Floats dot(Floats a, Floats b, Floats c) { return fma(a, b, c); }
inline Floats paired(Floats a, Floats) { return a; }
inline void store_values(float* p, Floats v) { store(p, v); }
inline Floats columns(const X* row, const X*) { return widened(row); }
#endif
constexpr int kDeep = kPairs ? 2 : 1;  // values of a unit

#if defined(WIDE)
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // of a NaN and another: the second one
inline Floats over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats scaled(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
inline Floats where_at_most(Floats a, Floats b, Floats yes, Floats no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LE_OQ), no, yes);
}
inline void transpose(Floats* r) {
  Floats t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(t[i + j]), high = _mm512_castps_pd(t[i + j + 2]);
      u[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      u[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  for (int j = 0; j < 4; ++j) {
    const Floats a = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88), b = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
    const Floats c = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xDD), d = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xDD);
    r[j] = _mm512_shuffle_f32x4(a, b, 0x88);
    r[4 + j] = _mm512_shuffle_f32x4(c, d, 0x88);
    r[8 + j] = _mm512_shuffle_f32x4(a, b, 0xDD);
    r[12 + j] = _mm512_shuffle_f32x4(c, d, 0xDD);
  }
}
#else
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats scaled(Floats x, Floats n) {  // in two steps, as half of a small exponent is one of a normal number
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
inline Floats where_at_most(Floats a, Floats b, Floats yes, Floats no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LE_OQ));
}
inline void transpose(Floats* r) {
  Floats t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xEE);
    }
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
    r[4 + j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
  }
}
#endif

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// 2^x for x up to 60, with an error of 1.7e-7 of it, 1 of 0; 0 from 2^-150 on, NaN of NaN.
INLINE inline Floats exp2(Floats x) {
  x = larger(all(-200.0f), x);
  const Floats n = nearest(x), f = sub(x, n);
  Floats p = all(1.326472725e-3f);
  p = fma(p, f, all(9.671512786e-3f));
  p = fma(p, f, all(5.550733744e-2f));
  p = fma(p, f, all(2.402224208e-1f));
  p = fma(p, f, all(6.931469776e-1f));
  p = fma(p, f, all(1.0f));
  return scaled(p, n);
}

// tanh of x, given 2 log2(e) x, with an error of 2e-7; NaN of NaN.
INLINE inline Floats tanh_of(Floats x) {
  const Floats power = exp2(sub(zero(), larger(all(-60.0f), sub(zero(), x))));
  return sub(all(1.0f), over(all(2.0f), add(all(1.0f), power)));
}

// `count` units (at most a vector) of a row, zeros behind them.
INLINE inline Floats units(const X* row, int64_t count) {
  X some[kLanes * kDeep] = {};
  if (count < kLanes) {
    std::memcpy(some, row, count * kDeep * sizeof(X));
    row = some;
  }
  if constexpr (kPairs) return load(reinterpret_cast<const float*>(row));
  else return widened(row);
}

}  // namespace te_models
