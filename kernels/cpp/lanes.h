// Rounding in vectors: as many finite numbers at once as the processor's registers hold.
//
// The arithmetic is in GCC's and Clang's vector types, which both compile for any processor; conversions between
// widths, of which GCC 12 makes several instructions, are named for AVX-512 and AVX2. What is left over of a row, and
// rows with a NaN, are rounded number by number.

#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "numbers.h"

namespace te_models {

// of functions that take or return vectors, which a call would pass by way of memory
#define INLINE __attribute__((always_inline)) inline

#if defined(__AVX512BW__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kPairs = kLanes / 2;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint64_t Pairs __attribute__((vector_size(4 * kLanes)));  // of words
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint8_t PackedBytes __attribute__((vector_size(kLanes / 2)));

INLINE Words bits_of(Floats x) { return Words(x); }
INLINE Floats float_of(Words x) { return Floats(x); }
INLINE Words all(uint32_t word) { return Words{} + word; }
INLINE Floats all(float f) { return float_of(all(te_models::bits_of(f))); }  // 0 + f has no sign where f is -0
template <class V, class P>
INLINE V load(const P* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class P>
INLINE void store(P* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

INLINE Words larger(Words a, Words b) { return a > b ? a : b; }
INLINE Words smaller(Words a, Words b) { return a < b ? a : b; }

// the bits of numbers as float32
INLINE Words read_bits(const Float32* p) { return load<Words>(p); }
INLINE Words read_bits(const BFloat16* p) {
#if defined(__AVX512BW__)
  return Words(_mm512_slli_epi32(_mm512_cvtepu16_epi32(__m256i(load<Halves>(p))), 16));
#elif defined(__AVX2__)
  return Words(_mm256_slli_epi32(_mm256_cvtepu16_epi32(__m128i(load<Halves>(p))), 16));
#else
  return __builtin_convertvector(load<Halves>(p), Words) << 16;
#endif
}

// the magnitudes of numbers, or (together 2) the larger one of two neighbours each
template <int together, class T>
INLINE Words read_magnitudes(const T* p) {
  if (together == 1) return read_bits(p) & 0x7FFFFFFF;
  if (sizeof(T) == 2) {
    const Words two = load<Words>(p);
    return larger(two & 0x7FFF0000, (two << 16) & 0x7FFF0000);
  }
  uint32_t found[kLanes];
  for (int i = 0; i < kLanes; ++i) found[i] = std::max(T::magnitude(p[2 * i]), T::magnitude(p[2 * i + 1]));
  return load<Words>(found);
}

#if defined(__AVX2__) && !defined(__AVX512BW__)
INLINE __m128i packed_halves(Words x) {  // of words below 2^16
  return _mm_packus_epi32(_mm256_castsi256_si128(__m256i(x)), _mm256_extracti128_si256(__m256i(x), 1));
}
#endif

// exact: numbers that the result's dtype has, or NaN; not exact: no NaN
template <bool exact>
INLINE void write(Float32* p, Floats v) {
  store(p, v);
}
template <bool exact>
INLINE void write(BFloat16* p, Floats v) {
  const Words u = bits_of(v), high = (exact ? u : u + 0x7FFF + ((u >> 16) & 1)) >> 16;
#if defined(__AVX512BW__)
  store(p, _mm512_cvtepi32_epi16(__m512i(high)));
#elif defined(__AVX2__)
  store(p, packed_halves(high));
#else
  store(p, __builtin_convertvector(high, Halves));
#endif
}
INLINE void write_bytes(uint8_t* p, Words x) {
#if defined(__AVX512BW__)
  store(p, _mm512_cvtepi32_epi8(__m512i(x)));
#elif defined(__AVX2__)
  const __m128i halves = packed_halves(x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
#else
  store(p, __builtin_convertvector(x, Bytes));
#endif
}

// codes of four bits, two to a byte
INLINE void write_pairs(uint8_t* p, Words codes) {
#if defined(__AVX512BW__)
  const Pairs both = Pairs(codes) | Pairs(codes) >> 28;
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_cvtepi64_epi8(__m512i(both)));
#elif defined(__AVX2__)
  const __m128i halves = packed_halves(codes), bytes = _mm_packus_epi16(halves, halves);
  const __m128i both = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));  // the even one and 16 times the odd one
  store(p, _mm_cvtsi128_si32(_mm_packus_epi16(both, both)));
#else
  store(p, __builtin_convertvector(Pairs(codes) | Pairs(codes) >> 28, PackedBytes));
#endif
}

// what bytes of E4M3 stand for, of which none is NaN
INLINE Floats read_e4m3(const uint8_t* p) {
#if defined(__AVX512BW__)
  const __m256i signed_bytes = _mm256_cvtepi8_epi16(__m128i(load<Bytes>(p)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(signed_bytes, 7), _mm256_set1_epi16(short(0xBF80)));
  return Floats(_mm512_cvtph_ps(halves)) * 256.0f;  // as float16 they are 2^-8 of it, subnormal numbers included
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i signed_bytes = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i halves = _mm_and_si128(_mm_slli_epi16(signed_bytes, 7), _mm_set1_epi16(short(0xBF80)));
  return Floats(_mm256_cvtph_ps(halves)) * 256.0f;
#else
  const Words byte = __builtin_convertvector(load<Bytes>(p), Words), magnitude = byte & 0x7F;
  const Words subnormal = bits_of(__builtin_convertvector(Integers(magnitude), Floats) * 0x1p-9f);
  return float_of((magnitude < 8 ? subnormal : (magnitude << 20) + 0x3C000000) | (byte & 0x80) << 24);
#endif
}

// what packed codes of E2M1 stand for
INLINE Floats read_e2m1(const uint8_t* p) {
#if defined(__AVX512BW__)
  const Pairs byte = Pairs(_mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  const Floats values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return Floats(_mm512_permutexvar_ps(__m512i((byte & 15) | byte >> 4 << 32), __m512(values)));
#else
#if defined(__AVX2__)
  const Pairs byte = Pairs(_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load<int32_t>(p))));
#else
  const Pairs byte = __builtin_convertvector(load<PackedBytes>(p), Pairs);
#endif
  const Words code = Words((byte & 15) | byte >> 4 << 32), magnitude = code & 7;
  const Words subnormal = bits_of(__builtin_convertvector(Integers(magnitude), Floats) * 0.5f);
  return float_of((magnitude < 2 ? subnormal : (magnitude << 22) + 0x3F000000) | (code & 8) << 28);
#endif
}

// the lower words times k
INLINE Pairs product(Pairs x, uint32_t k) {
#if defined(__AVX512BW__)
  return Pairs(_mm512_mul_epu32(__m512i(x), _mm512_set1_epi64(k)));
#elif defined(__AVX2__)
  return Pairs(_mm256_mul_epu32(__m256i(x), _mm256_set1_epi64x(k)));
#else
  return (x & 0xFFFFFFFF) * k;
#endif
}

INLINE uint32_t largest_of(Words x) {
  uint32_t lanes[kLanes], found = 0;
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) found = std::max(found, lanes[i]);
  return found;
}

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
INLINE Floats drawn(Floats magnitude, Words random) {
  const Words m = F::limited(magnitude), e = F::exponent(m);
  constexpr uint32_t mantissa = uint32_t(F::kMantissa) << 23;
  const Floats quanta = float_of(m) * float_of((254u << 23) + mantissa - e);
  const Floats below = __builtin_convertvector(__builtin_convertvector(quanta, Integers), Floats);
  const Floats uniform = __builtin_convertvector(Integers(random >> 8), Floats) * 0x1p-24f;
  const Words up = Words(uniform < quanta - below) & te_models::bits_of(1.0f);
  return (below + float_of(up)) * float_of(e - mantissa);
}

INLINE Floats with_sign(Floats magnitude, Words sign) { return float_of(bits_of(magnitude) | (sign & 0x80000000)); }

}  // namespace te_models
