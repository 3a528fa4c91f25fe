// Vectors: as many numbers at once as the processor's registers hold, or half as many with NARROW.
//
// The arithmetic is in GCC's and Clang's vector types, which both compile for any processor; conversions between
// widths, of which GCC 12 makes several instructions, are named for AVX-512 and AVX2. What is left over of a row, and
// rows with a NaN, are rounded number by number. What multiplies, at the end, is for x86 with AVX2 and FMA.

#pragma once

#if defined(__AVX2__)
#include "intrinsics.h"
#endif
#include "numbers.h"

namespace te_models {

// Of functions that take or return vectors, which a call would pass by way of memory, and of loops whose sums the
// compiler keeps in registers where all is one function and their indices are constants.
#define INLINE __attribute__((always_inline))

#if defined(__AVX512BW__) && !defined(NARROW)
#define WIDE
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kHalfLanes = kLanes / 2;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint64_t Pairs __attribute__((vector_size(4 * kLanes)));  // of words
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint8_t PackedBytes __attribute__((vector_size(kLanes / 2)));

INLINE inline Words bits_of(Floats x) { return Words(x); }
INLINE inline Floats float_of(Words x) { return Floats(x); }
INLINE inline Words all(uint32_t word) { return Words{} + word; }
INLINE inline Floats all(float f) { return float_of(all(te_models::bits_of(f))); }  // 0 + f has no sign where f is -0
template <class V, class P>
INLINE inline V load(const P* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class P>
INLINE inline void store(P* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

INLINE inline Words larger(Words a, Words b) { return a > b ? a : b; }
INLINE inline Words smaller(Words a, Words b) { return a < b ? a : b; }

// the bits of numbers as float32
INLINE inline Words read_bits(const Float32* p) { return load<Words>(p); }
INLINE inline Words read_bits(const BFloat16* p) {
#if defined(WIDE)
  return Words(_mm512_slli_epi32(_mm512_cvtepu16_epi32(__m256i(load<Halves>(p))), 16));
#elif defined(__AVX2__)
  return Words(_mm256_slli_epi32(_mm256_cvtepu16_epi32(__m128i(load<Halves>(p))), 16));
#else
  return __builtin_convertvector(load<Halves>(p), Words) << 16;
#endif
}

// the magnitudes of numbers, or (together 2) the larger one of two neighbours each
template <int together, class T>
INLINE inline Words read_magnitudes(const T* p) {
  if (together == 1) return read_bits(p) & 0x7FFFFFFF;
  if (sizeof(T) == 2) {
    const Words two = load<Words>(p);
    return larger(two & 0x7FFF0000, (two << 16) & 0x7FFF0000);
  }
  uint32_t found[kLanes];
  for (int i = 0; i < kLanes; ++i) found[i] = std::max(T::magnitude(p[2 * i]), T::magnitude(p[2 * i + 1]));
  return load<Words>(found);
}

#if defined(__AVX2__) && !defined(WIDE)
INLINE inline __m128i packed_halves(Words x) {  // of words below 2^16
  return _mm_packus_epi32(_mm256_castsi256_si128(__m256i(x)), _mm256_extracti128_si256(__m256i(x), 1));
}
#endif

// the bits of numbers rounded to bfloat16, of which none is NaN, each in the lower half of its lane
INLINE inline Words rounded_bfloat16(Floats v) {
  const Words u = bits_of(v);
  return (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
}
// the same as BFloat16::write, of any numbers
INLINE inline Words bfloat16_bits(Floats v) { return v == v ? rounded_bfloat16(v) : all(uint32_t(0x7FC0)); }
INLINE inline void write_halves(BFloat16* p, Words x) {  // of words below 2^16
#if defined(WIDE)
  store(p, _mm512_cvtepi32_epi16(__m512i(x)));
#elif defined(__AVX2__)
  store(p, packed_halves(x));
#else
  store(p, __builtin_convertvector(x, Halves));
#endif
}

// exact: numbers that the result's dtype has, or NaN; not exact: no NaN
template <bool exact>
INLINE inline void write(Float32* p, Floats v) {
  store(p, v);
}
template <bool exact>
INLINE inline void write(BFloat16* p, Floats v) {
  write_halves(p, exact ? bits_of(v) >> 16 : rounded_bfloat16(v));
}
INLINE inline void write(Float32* p, Floats v) { store(p, v); }
INLINE inline void write(BFloat16* p, Floats v) { write_halves(p, bfloat16_bits(v)); }
INLINE inline void write_bytes(uint8_t* p, Words x) {
#if defined(WIDE)
  store(p, _mm512_cvtepi32_epi8(__m512i(x)));
#elif defined(__AVX2__)
  const __m128i halves = packed_halves(x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
#else
  store(p, __builtin_convertvector(x, Bytes));
#endif
}

// codes of four bits, two to a byte
INLINE inline void write_pairs(uint8_t* p, Words codes) {
#if defined(WIDE)
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
INLINE inline Floats read_e4m3(const uint8_t* p) {
#if defined(WIDE)
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
INLINE inline Floats read_e2m1(const uint8_t* p) {
#if defined(WIDE)
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
INLINE inline Pairs product(Pairs x, uint32_t k) {
#if defined(WIDE)
  return Pairs(_mm512_mul_epu32(__m512i(x), _mm512_set1_epi64(k)));
#elif defined(__AVX2__)
  return Pairs(_mm256_mul_epu32(__m256i(x), _mm256_set1_epi64x(k)));
#else
  return (x & 0xFFFFFFFF) * k;
#endif
}

INLINE inline uint32_t largest_of(Words x) {
  uint32_t lanes[kLanes], found = 0;
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) found = std::max(found, lanes[i]);
  return found;
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int kRows = kLanes / 4;  // rows that are multiplied side by side
INLINE inline Floats zero() { return Floats{}; }
INLINE inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(WIDE)
  return _mm512_fmadd_ps(a, b, c);
#else
  return _mm256_fmadd_ps(a, b, c);
#endif
}
INLINE inline Floats fnma(Floats a, Floats b, Floats c) {  // c - a * b
#if defined(WIDE)
  return _mm512_fnmadd_ps(a, b, c);
#else
  return _mm256_fnmadd_ps(a, b, c);
#endif
}
INLINE inline Floats load(const float* p) { return load<Floats>(p); }
INLINE inline Floats mul(Floats a, Floats b) { return a * b; }
INLINE inline Floats sub(Floats a, Floats b) { return a - b; }
INLINE inline Floats add(Floats a, Floats b) { return a + b; }
template <class T>
INLINE inline Floats widened(const T* p) {
  return float_of(read_bits(p));
}

#if defined(WIDE)
INLINE inline float sum(Floats v) { return _mm512_reduce_add_ps(v); }  // one half and the other, again and again
#else
INLINE inline float sum(Floats v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
#endif

// Have memory bring what is read for the next rows, while these are decoded. INLINE, or GCC takes the call for one that
// does nothing.
INLINE inline void soon(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

template <int rows = kRows, class F>
INLINE inline void each_row(const F& f) {
  f(std::integral_constant<int, 0>{});
  if constexpr (rows > 1) f(std::integral_constant<int, 1>{});
  if constexpr (rows == 4) {
    f(std::integral_constant<int, 2>{});
    f(std::integral_constant<int, 3>{});
  }
}

// Call f with one of the constants 1 to `most`: `count`, or the nearest.
template <int most, class F>
INLINE inline void with_count(int count, const F& f) {
  if constexpr (most > 1)
    if (count < most) return with_count<most - 1>(count, f);
  f(std::integral_constant<int, most>{});
}

#endif

}  // namespace te_models
