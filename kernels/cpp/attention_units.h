// What flash attention computes in vectors: products of units, powers of two, transposition, rounding.
//
// A unit is what one instruction multiplies in a lane and adds up: a float, or with AVX512_BF16 two neighbouring
// bfloat16 values of the sum, whose products are added to a float32.

#pragma once

#include <cstdlib>
#include <memory>

#include "vectors.h"

namespace te_models {

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(NARROW) && !defined(FLOATS)
constexpr bool kPairs = X::rounds;
inline V dot(V a, V b, V c) {
  if constexpr (kPairs) return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
  else return fma(a, b, c);
}
// bfloat16 of two vectors side by side: lane i has a[i] in its low half and b[i] in its high half
inline V paired(V a, V b) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a)));
}
// bfloat16 of one vector, or the vector as it is where a unit is a float
inline void store_values(float* p, V v) {
  if constexpr (kPairs) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
  else store(p, v);
}
// pairs of two rows in memory
inline V columns(const X* row, const X* next) {
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
inline V dot(V a, V b, V c) { return fma(a, b, c); }
inline V paired(V a, V) { return a; }
inline void store_values(float* p, V v) { store(p, v); }
inline V columns(const X* row, const X*) { return widened(row); }
#endif
constexpr int kDeep = kPairs ? 2 : 1;  // values of a unit

#if defined(__AVX512BW__) && !defined(NARROW)
inline V larger(V a, V b) { return _mm512_max_ps(a, b); }  // of a NaN and another: the second one
inline V over(V a, V b) { return _mm512_div_ps(a, b); }
inline V nearest(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V scaled(V x, V n) { return _mm512_scalef_ps(x, n); }
inline V where_at_most(V a, V b, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LE_OQ), no, yes);
}
// as BFloat16::write
inline void write(BFloat16* to, V v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(bfloat16_bits(v)));
}
inline void transpose(V* r) {
  V t[16], u[16];
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
    const V a = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88), b = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
    const V c = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xDD), d = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xDD);
    r[j] = _mm512_shuffle_f32x4(a, b, 0x88);
    r[4 + j] = _mm512_shuffle_f32x4(c, d, 0x88);
    r[8 + j] = _mm512_shuffle_f32x4(a, b, 0xDD);
    r[12 + j] = _mm512_shuffle_f32x4(c, d, 0xDD);
  }
}
#else
inline V larger(V a, V b) { return _mm256_max_ps(a, b); }
inline V over(V a, V b) { return _mm256_div_ps(a, b); }
inline V nearest(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V scaled(V x, V n) {  // in two steps, as half of a small exponent is one of a normal number
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
inline V where_at_most(V a, V b, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LE_OQ)); }
inline void write(BFloat16* to, V v) {
  const __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7FC0), nan);
  const __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
}
inline void transpose(V* r) {
  V t[8], u[8];
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
INLINE inline V exp2(V x) {
  x = larger(all(-200.0f), x);
  const V n = nearest(x), f = sub(x, n);
  V p = all(1.326472725e-3f);
  p = fma(p, f, all(9.671512786e-3f));
  p = fma(p, f, all(5.550733744e-2f));
  p = fma(p, f, all(2.402224208e-1f));
  p = fma(p, f, all(6.931469776e-1f));
  p = fma(p, f, all(1.0f));
  return scaled(p, n);
}

// tanh of x, given 2 log2(e) x, with an error of 2e-7; NaN of NaN.
INLINE inline V tanh_of(V x) {
  const V power = exp2(sub(zero(), larger(all(-60.0f), sub(zero(), x))));
  return sub(all(1.0f), over(all(2.0f), add(all(1.0f), power)));
}

// `count` units (at most a vector) of a row, zeros behind them.
INLINE inline V units(const X* row, int64_t count) {
  X some[kWidth * kDeep] = {};
  if (count < kWidth) {
    std::memcpy(some, row, count * kDeep * sizeof(X));
    row = some;
  }
  if constexpr (kPairs) return load(reinterpret_cast<const float*>(row));
  else return widened(row);
}

inline void write(Float32* to, V v) { store(&to->value, v); }

}  // namespace te_models
