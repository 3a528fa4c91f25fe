// A product of a few bfloat16 rows by a weight of bytes whose values are looked up: x86 with AVX512_VBMI and
// AVX512_BF16, which find 64 bytes in a table, and add up products of pairs, in one instruction each.
//
// A byte has 128 magnitudes, and a matrix, or a block of it, one scale: a table has what each of them dequantizes to,
// NaN and the rounding to bfloat16 included. That takes 8 instructions for 64 values, where decoding takes 7 for 16
// and looks for NaN first. Where each row has scales of its own (MXFP8) the table is of the format's values, and the
// sum over a block is multiplied by its scale, a power of two. Every sum runs over the lanes of two vectors, then over
// these.

#pragma once

#include "few_rows_decode.h"

namespace te_models {

#if defined(OF_BYTES) && !defined(NARROW) && !defined(DECODED) && defined(__AVX512VBMI__) && defined(__AVX512BF16__)
constexpr bool kLooksUp = X::rounds;
constexpr int kChunk = 64;  // bytes of a vector
constexpr int kAhead = 1024;  // bytes that are read before they are needed

struct Table {  // the lower and the upper bytes of 128 values
  uint8_t low[128], high[128];
};

// The format's values, of all bytes without a sign.
static const float* values_of_bytes() {  // not inline: the loader would take one table for all formats
  static const std::vector<float> found = [] {
    std::vector<float> values(128);
    uint8_t codes[16] = {};
    for (int byte = 0; byte < 128; ++byte) {
      codes[0] = uint8_t(byte);
      float lanes[kLanes];
      store(lanes, W::decode(codes));
      values[byte] = (byte & W::kSpecial) == W::kSpecial ? W::special(uint8_t(byte)) : lanes[0] * W::kFactor;
    }
    return values;
  }();
  return found.data();
}

inline void fill(Table& table, float scale) {
  const float* const values = values_of_bytes();
  for (int i = 0; i < 128; i += 16) {
    const __m512i found = __m512i(bfloat16_bits(mul(load(values + i), all(scale))));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(table.low + i), _mm512_cvtepi32_epi8(found));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(table.high + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(found, 8)));
  }
}

struct Lookup {
  __m512i low[2], high[2];
  INLINE explicit Lookup(const Table& t)
      : low{_mm512_loadu_si512(t.low), _mm512_loadu_si512(t.low + 64)},
        high{_mm512_loadu_si512(t.high), _mm512_loadu_si512(t.high + 64)} {}
  // 64 bytes as bfloat16: of every 16 the first eight, and the others.
  INLINE void operator()(__m512i bytes, __m512bh* found) const {
    const __m512i l = _mm512_permutex2var_epi8(low[0], bytes, low[1]);  // the sign is no part of an index
    const __m512i h = _mm512_permutex2var_epi8(high[0], bytes, high[1]);
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    const __m512i signed_h = _mm512_ternarylogic_epi32(h, bytes, sign, 0xF8);  // h | (bytes & sign)
    found[0] = __m512bh(_mm512_unpacklo_epi8(l, signed_h));
    found[1] = __m512bh(_mm512_unpackhi_epi8(l, signed_h));
  }
};

// x [M, K] as it is multiplied: of each 64 columns of a row two vectors, in the order of Lookup's.
inline std::vector<uint16_t> in_order(const X* x, int64_t M, int64_t K, int64_t padded) {
  std::vector<uint16_t> found(M * padded);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t k = 0; k < K; ++k) {
      const int64_t place = k % kChunk, half = place % 16 / 8;
      uint16_t bits;
      std::memcpy(&bits, x + m * K + k, 2);
      found[m * padded + k - place + half * 32 + place / 16 * 8 + place % 8] = bits;
    }
  return found;
}

inline __m512bh pairs_of(const uint16_t* p) { return __m512bh(_mm512_loadu_si512(p)); }

// The scales of a row, one for each 32 columns: 16 of them at a time.
struct RowScales {
  const uint8_t* from;
  int64_t count;  // that are left
  __m512i some, place;
  INLINE void next() {
    const __mmask16 there = count < 16 ? (__mmask16(1) << count) - 1 : __mmask16(0xFFFF);
    some = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, from)), 23);
    place = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    from += 16, count -= 16;
  }
  // of the next 64 columns, for the lanes of their sums
  INLINE Floats take() {
    const __m512i found = _mm512_permutexvar_epi32(place, some);
    place = _mm512_add_epi32(place, _mm512_set1_epi32(2));
    return _mm512_castsi512_ps(found);
  }
};

// `count` rows of x by a row of the weight -> out [count]. tables: of each `columns`; or one, and scales of each 32.
template <int count, bool scaled>
INLINE inline void by_table(const uint8_t* row, int64_t K, const Table* tables, int64_t columns, const uint8_t* scale,
                            const uint16_t* x, int64_t padded, float* out) {
  Floats acc[count][2];
  for (auto& some : acc) some[0] = some[1] = zero();
  RowScales scales{scale, (K + 31) / 32, no_bytes(), no_bytes()};
  const auto add_chunk = [&](const Lookup& lookup, int64_t k, __m512i bytes) INLINE {
    __m512bh w[2];
    lookup(bytes, w);
    const Floats factor = scaled ? scales.take() : zero();
#pragma GCC unroll 4
    for (int m = 0; m < count; ++m) {
      const uint16_t* const from = x + m * padded + k;
      if constexpr (scaled) {
        const Floats sum = _mm512_dpbf16_ps(_mm512_dpbf16_ps(zero(), w[0], pairs_of(from)), w[1], pairs_of(from + 32));
        acc[m][0] = fma(sum, factor, acc[m][0]);
      } else {
        acc[m][0] = _mm512_dpbf16_ps(acc[m][0], w[0], pairs_of(from));
        acc[m][1] = _mm512_dpbf16_ps(acc[m][1], w[1], pairs_of(from + 32));
      }
    }
  };
  const int64_t step = scaled ? 16 * 32 : columns;  // of one vector of scales, or one table
  for (int64_t begin = 0; begin < K; begin += step) {
    const Lookup lookup(*tables);
    if (scaled) scales.next();
    else ++tables;
    const int64_t end = std::min(begin + step, K);
    int64_t k = begin;
    for (; k + kChunk <= end; k += kChunk) {
      soon(row + k + kAhead);
      add_chunk(lookup, k, _mm512_loadu_si512(row + k));
    }
    if (k < end) add_chunk(lookup, k, _mm512_maskz_loadu_epi8((uint64_t(1) << (end - k)) - 1, row + k));
  }
  for (int m = 0; m < count; ++m) out[m] = sum(add(acc[m][0], acc[m][1]));
}

// Whether all scales of the weight leave its values far from the ends of float32.
inline bool ordinary_scales(const Weight& w, int64_t N) {
  const int64_t down = (N + w.block_rows - 1) / w.block_rows, across = (w.K + w.block_columns - 1) / w.block_columns;
  if (w.kind == kE8m0) {  // which lie side by side
    uint8_t low = 255, high = 0;
    for (int64_t i = 0; i < down; ++i) {
      const uint8_t* const p = static_cast<const uint8_t*>(w.scale) + i * w.down;
#pragma omp simd reduction(min : low) reduction(max : high)
      for (int64_t j = 0; j < across; ++j) {
        low = std::min(low, p[j]);
        high = std::max(high, p[j]);
      }
    }
    return low > 27 && high < 227;
  }
  bool found = true;
  for (int64_t i = 0; i < down; ++i)
    for (int64_t j = 0; j < across; ++j) {
      const float scale = std::fabs(static_cast<const float*>(w.scale)[i * w.down + j * w.across]);
      found &= scale > 0x1p-100f && scale < 0x1p100f;
    }
  return found;
}

template <bool scaled>
inline void by_tables(const X* x, const X* bias, X* out, int64_t M, int64_t N, const Weight& w, int threads) {
  const int64_t K = w.K, padded = (K + kChunk - 1) / kChunk * kChunk;
  const std::vector<uint16_t> ordered = in_order(x, M, K, padded);
  const int64_t columns = scaled ? padded : w.block_columns, blocks = (K + columns - 1) / columns;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<Table> tables(blocks);
    if (scaled) fill(tables[0], 1.0f);
    int64_t filled = -1;  // the block of rows whose tables these are
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; ++n) {
      const int64_t block = n / w.block_rows;
      if (!scaled && block != filled) {
        filled = block;
        const float* const p = static_cast<const float*>(w.scale) + block * w.down;
        for (int64_t b = 0; b < blocks; ++b) fill(tables[b], p[b * w.across]);
      }
      const uint8_t* const row = w.data + n * w.stride;
      const uint8_t* const scale = scaled ? static_cast<const uint8_t*>(w.scale) + block * w.down : nullptr;
      const float b = bias == nullptr ? 0.0f : X::read(bias[n]);
      for (int64_t m = 0; m < M; m += 4) {
        float found[4];
        const int count = int(std::min<int64_t>(4, M - m));
        const uint16_t* const from = ordered.data() + m * padded;
        with_count<4>(count, [&](auto c) INLINE {
          by_table<decltype(c)::value, scaled>(row, K, tables.data(), columns, scale, from, padded, found);
        });
        for (int i = 0; i < count; ++i) out[(m + i) * N + n] = X::write(bias == nullptr ? found[i] : found[i] + b);
      }
    }
  }
}

inline bool looked_up(const X* x, const X* bias, X* out, int64_t M, int64_t N, const Weight& w, int threads) {
  if (w.kind == kE8m0) {
    if (w.block_columns != 32 || w.across != 1 || !ordinary_scales(w, N)) return false;
    by_tables<true>(x, bias, out, M, N, w, threads);
    return true;
  }
  const bool whole = w.block_columns >= w.K || w.block_columns % kChunk == 0;
  const bool many = w.block_rows >= std::min<int64_t>(N, 32);  // rows, or filling the tables takes the time
  if (!whole || !many || !ordinary_scales(w, N)) return false;
  by_tables<false>(x, bias, out, M, N, w, threads);
  return true;
}
#else
constexpr bool kLooksUp = false;
inline bool looked_up(const X*, const X*, X*, int64_t, int64_t, const Weight&, int) { return false; }
#endif

}  // namespace te_models
