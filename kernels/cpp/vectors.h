// Vectors: of AVX-512, or half as wide of AVX2, and how bytes and codes become floats in them.

#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace te_models {

// the compiler keeps sums in registers where all is one function and their indices are constants
#define INLINE __attribute__((always_inline))

#if defined(__AVX512BW__) && !defined(NARROW)
constexpr int kWidth = 16, kRows = 4;  // values of a vector; rows that are multiplied side by side
using V = __m512;
inline V zero() { return _mm512_setzero_ps(); }
inline V all(float f) { return _mm512_set1_ps(f); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline float sum(V v) { return _mm512_reduce_add_ps(v); }  // one half and the other, again and again
inline V widened(const BFloat16* p) {
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}
// the bits of numbers rounded to bfloat16, as BFloat16::write, each in the lower half of its lane
inline __m512i bfloat16_bits(V v) {
  const __m512i u = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
}
constexpr int kBytes = 64;
using Bytes = __m512i;
inline Bytes no_bytes() { return _mm512_setzero_si512(); }
inline Bytes larger_magnitudes(Bytes found, const uint8_t* p) {
  return _mm512_max_epu8(found, _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(0x7F)));
}
inline bool any_at_least(Bytes x, uint8_t least) { return _mm512_cmpge_epu8_mask(x, _mm512_set1_epi8(char(least))); }
inline __m256i bytes(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline V halves(__m256i h) { return _mm512_cvtph_ps(h); }
inline __m512i twice_bytes(const uint8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void both_halves(__m512i h, V* to) {
  to[0] = halves(_mm512_castsi512_si256(h));
  to[1] = halves(_mm512_extracti64x4_epi64(h, 1));
}
inline __m512i up(__m512i x, int n) { return _mm512_slli_epi16(x, n); }
inline __m512i masked(__m512i x, short m) { return _mm512_and_si512(x, _mm512_set1_epi16(m)); }
inline __m256i up(__m256i x, int n) { return _mm256_slli_epi16(x, n); }
inline __m256i masked(__m256i x, short m) { return _mm256_and_si256(x, _mm256_set1_epi16(m)); }
// 16 values of E2M1 from a table of all 16
inline void e2m1(const uint8_t* p, const float* table, V* to) {
  uint32_t low, high;
  std::memcpy(&low, p, 4);
  std::memcpy(&high, p + 4, 4);
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i codes = _mm512_mask_set1_epi32(_mm512_set1_epi32(int(low)), 0xFF00, int(high));
  *to = _mm512_permutexvar_ps(_mm512_srlv_epi32(codes, shifts), _mm512_load_ps(table));
}
#else
constexpr int kWidth = 8, kRows = 2;
using V = __m256;
inline V zero() { return _mm256_setzero_ps(); }
inline V all(float f) { return _mm256_set1_ps(f); }
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline float sum(V v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline V widened(const BFloat16* p) {
  const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
constexpr int kBytes = 32;
using Bytes = __m256i;
inline Bytes no_bytes() { return _mm256_setzero_si256(); }
inline Bytes larger_magnitudes(Bytes found, const uint8_t* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_max_epu8(found, _mm256_and_si256(x, _mm256_set1_epi8(0x7F)));
}
inline bool any_at_least(Bytes x, uint8_t least) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(x, _mm256_set1_epi8(char(least))), x));
}
inline __m128i bytes(const uint8_t* p) {
  return _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline V halves(__m128i h) { return _mm256_cvtph_ps(h); }
inline __m256i twice_bytes(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void both_halves(__m256i h, V* to) {
  to[0] = halves(_mm256_castsi256_si128(h));
  to[1] = halves(_mm256_extracti128_si256(h, 1));
}
inline __m256i up(__m256i x, int n) { return _mm256_slli_epi16(x, n); }
inline __m256i masked(__m256i x, short m) { return _mm256_and_si256(x, _mm256_set1_epi16(m)); }
inline __m128i up(__m128i x, int n) { return _mm_slli_epi16(x, n); }
inline __m128i masked(__m128i x, short m) { return _mm_and_si128(x, _mm_set1_epi16(m)); }
inline void e2m1(const uint8_t* p, const float* table, V* to) {
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256 magnitudes = _mm256_load_ps(table);
  for (int i = 0; i < 2; ++i) {
    uint32_t eight;
    std::memcpy(&eight, p + 4 * i, 4);
    const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(int(eight)), shifts);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
    to[i] = _mm256_or_ps(_mm256_permutevar8x32_ps(magnitudes, codes), _mm256_castsi256_ps(sign));
  }
}
#endif

// Have memory bring what is read for the next rows, while these are decoded. INLINE, or GCC takes the call for one that
// does nothing.
INLINE inline void soon(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

template <class F>
INLINE inline void each_row(const F& f) {
  f(std::integral_constant<int, 0>{});
  f(std::integral_constant<int, 1>{});
  if constexpr (kRows == 4) {
    f(std::integral_constant<int, 2>{});
    f(std::integral_constant<int, 3>{});
  }
}

inline V widened(const Float32* p) { return load(&p->value); }

// Call f with one of the constants 1 to `most`: `count`, or the nearest.
template <int most, class F>
INLINE inline void with_count(int count, const F& f) {
  if constexpr (most > 1)
    if (count < most) return with_count<most - 1>(count, f);
  f(std::integral_constant<int, most>{});
}

}  // namespace te_models
