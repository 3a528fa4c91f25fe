// How bytes and codes of four bits become floats in vectors, on x86 with AVX2.

#pragma once

#include "simd.h"

namespace te_models {

#if defined(WIDE)
constexpr int kBytes = 64;
using Register = __m512i;
INLINE inline Register no_bytes() { return _mm512_setzero_si512(); }
INLINE inline Register larger_magnitudes(Register found, const uint8_t* p) {
  return _mm512_max_epu8(found, _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(0x7F)));
}
INLINE inline bool any_at_least(Register x, uint8_t least) {
  return _mm512_cmpge_epu8_mask(x, _mm512_set1_epi8(char(least)));
}
INLINE inline Words widened_bytes(const uint8_t* p) {
  return Words(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
INLINE inline bool any(Words x) { return _mm512_test_epi32_mask(__m512i(x), __m512i(x)) != 0; }
INLINE inline __m256i bytes(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE inline Floats halves(__m256i h) { return _mm512_cvtph_ps(h); }
INLINE inline __m512i twice_bytes(const uint8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE inline void both_halves(__m512i h, Floats* to) {
  to[0] = halves(_mm512_castsi512_si256(h));
  to[1] = halves(_mm512_extracti64x4_epi64(h, 1));
}
INLINE inline __m512i up(__m512i x, int n) { return _mm512_slli_epi16(x, n); }
INLINE inline __m512i masked(__m512i x, short m) { return _mm512_and_si512(x, _mm512_set1_epi16(m)); }
INLINE inline __m256i up(__m256i x, int n) { return _mm256_slli_epi16(x, n); }
INLINE inline __m256i masked(__m256i x, short m) { return _mm256_and_si256(x, _mm256_set1_epi16(m)); }
// 16 values of E2M1 from a table of all 16
INLINE inline void e2m1(const uint8_t* p, const float* table, Floats* to) {
  uint32_t low, high;
  std::memcpy(&low, p, 4);
  std::memcpy(&high, p + 4, 4);
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i codes = _mm512_mask_set1_epi32(_mm512_set1_epi32(int(low)), 0xFF00, int(high));
  *to = _mm512_permutexvar_ps(_mm512_srlv_epi32(codes, shifts), _mm512_load_ps(table));
}
#else
constexpr int kBytes = 32;
using Register = __m256i;
INLINE inline Register no_bytes() { return _mm256_setzero_si256(); }
INLINE inline Register larger_magnitudes(Register found, const uint8_t* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_max_epu8(found, _mm256_and_si256(x, _mm256_set1_epi8(0x7F)));
}
INLINE inline bool any_at_least(Register x, uint8_t least) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(x, _mm256_set1_epi8(char(least))), x));
}
INLINE inline Words widened_bytes(const uint8_t* p) {
  return Words(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
INLINE inline bool any(Words x) { return !_mm256_testz_si256(__m256i(x), __m256i(x)); }
// 32 floats with the sign, exponent and mantissa of bytes in their places: every fourth byte from the first on, from
// the second on, and so on.
template <int mantissa>
INLINE inline void decode_fours(const uint8_t* p, Floats* to) {
  constexpr int shift = mantissa + 1;  // from a byte's upper end to the place of a bfloat16's 7 bits of mantissa
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), upper = _mm256_set1_epi32(int(0xFFFF0000));
  const __m256i mask = _mm256_set1_epi16(short(0x8000 | 0x7F00 >> shift));
  const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(v, shift), mask);
  const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), shift), mask);
  to[0] = _mm256_castsi256_ps(_mm256_slli_epi32(even, 16));
  to[1] = _mm256_castsi256_ps(_mm256_slli_epi32(odd, 16));
  to[2] = _mm256_castsi256_ps(_mm256_and_si256(even, upper));
  to[3] = _mm256_castsi256_ps(_mm256_and_si256(odd, upper));
}
INLINE inline Floats low_and_high(float low, float high) {
  return _mm256_set_m128(_mm_set1_ps(high), _mm_set1_ps(low));
}
INLINE inline void e2m1(const uint8_t* p, const float* table, Floats* to) {
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

}  // namespace te_models
