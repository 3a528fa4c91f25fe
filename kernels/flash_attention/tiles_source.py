"""The C++ that both passes of flash attention are made of: packed operands, products of tiles, and 2^x.

A tile has the queries of some positions, all heads that share a key head beside each other, in the lanes of three
vectors. So what is done to a query (its largest score, its sum, its mask) is one instruction for a vector of them,
nothing is added up across lanes, and a tile of g heads has fewer positions that see different keys.

A unit is what one instruction multiplies in a lane and adds up: a float, or with AVX512_BF16 two neighbouring bfloat16
values of the sum, whose products are added to a float32. A product reads one operand a vector at a time and the other a
unit at a time, in panels of as many rows or columns as a vector has lanes, so that both are read front to back.
"""

from ..gemm.vectors import VECTORS

TILES = (
    """#include <cstdlib>
#include <memory>

"""
    + VECTORS
    + r"""
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
inline V nearest(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V scaled(V x, V n) { return _mm512_scalef_ps(x, n); }
inline V where_at_most(V a, V b, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LE_OQ), no, yes);
}
// as BFloat16::write
inline void write(BFloat16* to, V v) {
  const __m512i u = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __m512i rounded = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(rounded));
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

constexpr int kVectors = 3;               // of a tile
constexpr int kTall = kWidth / 2;         // rows of a product whose sums are in registers, with three vectors each
constexpr int kLanes = kVectors * kWidth;
constexpr int64_t kKeys = 128;            // of a block: a tile's scores with all of them are there at one time
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

inline int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Free { void operator()(void* p) const { std::free(p); } };
using Buffer = std::unique_ptr<float[], Free>;
inline Buffer buffer(int64_t units) {
  return Buffer(static_cast<float*>(std::aligned_alloc(64, up_to(std::max<int64_t>(units, 1) * 4, 64))));
}

// 2^x for x of at most about 0, with an error of 1e-7 of it; 0 from 2^-150 on, NaN of NaN.
INLINE inline V exp2(V x) {
  x = larger(all(-200.0f), x);
  const V n = nearest(x), f = sub(x, n);
  V p = all(1.327647129e-3f);
  p = fma(p, f, all(9.670180920e-3f));
  p = fma(p, f, all(5.550713092e-2f));
  p = fma(p, f, all(2.402211651e-1f));
  p = fma(p, f, all(6.931469440e-1f));
  p = fma(p, f, all(1.000000048f));
  return scaled(p, n);
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

// Rows of at most a vector's lanes -> a panel [values / kDeep][kWidth]: row i in lane i, units of neighbours in a row.
inline void pack_across(const X* const* rows, int count, int64_t values, float* to) {
  const int64_t deep = values / kDeep;
  for (int64_t at = 0; at < deep; at += kWidth) {
    const int64_t some = std::min<int64_t>(kWidth, deep - at);
    V r[kWidth];
    for (int i = 0; i < kWidth; ++i) r[i] = i < count ? units(rows[i] + at * kDeep, some) : zero();
    transpose(r);
    for (int64_t i = 0; i < some; ++i) store(to + (at + i) * kWidth, r[i]);
  }
}

// One row, or two that are neighbours in a sum -> row `at` of each panel [deep][kWidth] of their columns.
inline void pack_down(const X* row, const X* next, int64_t values, int64_t deep, int64_t at, float* to) {
  for (int64_t c = 0; c < values; c += kWidth) store(to + c * deep + at * kWidth, columns(row + c, next + c));
}

// sums[r][v] += the sum over d of a[r * a_row + d * a_step] times the vector at b[v * b_vector + d * b_step]
template <int rows, int vectors>
INLINE inline void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_vector,
                            int64_t b_step, int64_t deep, V (&sums)[rows][vectors]) {
  for (int64_t d = 0; d < deep; ++d, a += a_step, b += b_step) {
    V x[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) x[v] = load(b + v * b_vector);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const V y = all(a[r * a_row]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[r][v] = dot(y, x[v], sums[r][v]);
    }
  }
}

// results [values][vectors * kWidth] = them times `factor`, or zero at first, plus the sum over keys of their rows, in
// panels of `all_deep` units, times weights [keys / kDeep][vectors * kWidth]
template <int vectors>
INLINE inline void add_rows(const float* keys, int64_t all_deep, const float* weights, int64_t deep, int64_t count,
                            const V (&factor)[vectors], bool first, float* results) {
  for (int64_t c = 0; c < count; c += kTall) {
    V sums[kTall][vectors];
    float* const place = results + c * vectors * kWidth;
    for (int i = 0; i < kTall; ++i)
      for (int v = 0; v < vectors; ++v)
        sums[i][v] = first ? zero() : mul(load(place + (i * vectors + v) * kWidth), factor[v]);
    const float* const panel = keys + c / kWidth * (all_deep * kWidth) + c % kWidth;
    multiply(panel, 1, kWidth, weights, kWidth, vectors * kWidth, deep, sums);
    for (int i = 0; i < kTall; ++i)
      for (int v = 0; v < vectors; ++v) store(place + (i * vectors + v) * kWidth, sums[i][v]);
  }
}

// Where rows [values] of one head lie, elements apart: of a batch, of a position, of a head.
struct Strides { int64_t batch, position, head; };

struct Sizes {
  int64_t batch, heads, groups, queries, keys, channels, values;
  int64_t causal, window;  // window: how many keys a causal query sees, its own included; 0: all
  int64_t shared() const { return heads / groups; }
  int64_t rows() const { return queries * shared(); }  // of all queries that share a key head, position by position
};

// The queries of a tile: `count` rows from `begin` on, and which keys they see.
struct Tile {
  int64_t begin, count;
  int64_t first, end;            // the keys that some query sees, from a whole panel on
  int64_t all_from, all_before;  // the keys that all queries see
  float from[kLanes], to[kLanes];  // of each query the first key and the last one
  Tile(const Sizes& s, int64_t begin, int64_t count) : begin(begin), count(count) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t position = (begin + std::min(i, count - 1)) / s.shared();
      const int64_t last = s.causal ? s.keys - s.queries + position : s.keys - 1;
      to[i] = float(last);
      from[i] = float(s.window ? std::max<int64_t>(0, last - s.window + 1) : 0);
    }
    first = int64_t(from[0]) / kWidth * kWidth;
    all_from = int64_t(from[kLanes - 1]);
    all_before = int64_t(to[0]) + 1;
    end = int64_t(to[kLanes - 1]) + 1;
  }
};

template <class T>
inline T* row_of(T* data, const Strides& strides, const Sizes& s, int64_t batch, int64_t group, int64_t row) {
  const int64_t position = row / s.shared(), head = group * s.shared() + row % s.shared();
  return data + batch * strides.batch + position * strides.position + head * strides.head;
}

// The rows of a tile's queries -> panels [kVectors][values / kDeep][kWidth].
inline void pack_tile(const X* data, const Strides& strides, const Sizes& s, int64_t batch, int64_t group,
                      const Tile& tile, int64_t values, float* to) {
  for (int64_t first = 0; first < tile.count; first += kWidth) {
    const X* rows[kWidth];
    const int count = int(std::min<int64_t>(kWidth, tile.count - first));
    for (int i = 0; i < count; ++i) rows[i] = row_of(data, strides, s, batch, group, tile.begin + first + i);
    pack_across(rows, count, values, to + first * (values / kDeep));
  }
}

// A tile's results [values][vectors * kWidth] times a factor of each query -> `count` rows [values].
inline void unpack_tile(const float* results, X* const* rows, int64_t count, int64_t values, int vectors,
                        const float* factors) {
  for (int64_t first = 0; first < count; first += kWidth)
    for (int64_t c = 0; c < values; c += kWidth) {
      V r[kWidth];
      for (int i = 0; i < kWidth; ++i) r[i] = load(results + (c + i) * vectors * kWidth + first);
      transpose(r);
      for (int i = 0; i < kWidth && first + i < count; ++i)
        write(rows[first + i] + c, mul(r[i], all(factors[first + i])));
    }
}

// Keys, or values, of one panel -> [kWidth keys across], for the sums over channels.
inline void pack_keys_across(const X* head, int64_t stride, int64_t keys, int64_t panel, int64_t values, float* to) {
  const X* rows[kWidth];
  const int count = int(std::min<int64_t>(kWidth, keys - panel * kWidth));
  for (int i = 0; i < count; ++i) rows[i] = head + (panel * kWidth + i) * stride;
  pack_across(rows, count, values, to + panel * kWidth * (values / kDeep));
}

// The same keys -> their places in panels of columns, for the sums over keys. deep: units of all keys.
inline void pack_keys_down(const X* head, int64_t stride, int64_t keys, int64_t panel, int64_t values, int64_t deep,
                           float* to) {
  static const X nothing[256] = {};
  for (int64_t i = panel * kWidth; i < (panel + 1) * kWidth; i += kDeep)
    pack_down(i < keys ? head + i * stride : nothing, i + 1 < keys ? head + (i + 1) * stride : nothing, values, deep,
              i / kDeep, to);
}

// Scores of a tile with `rows` keys from `begin` on -> scores [rows][vectors * kWidth], and each query's largest.
template <int vectors>
INLINE inline void scores_of(const Tile& tile, const float* queries, const float* keys, int64_t begin, int64_t rows,
                             int64_t deep, float* scores, V (&largest)[vectors]) {
  for (int64_t r = 0; r < rows; r += kTall) {
    V sums[kTall][vectors];
    for (int i = 0; i < kTall; ++i)
      for (int v = 0; v < vectors; ++v) sums[i][v] = zero();
    const int64_t key = begin + r;
    const float* const panel = keys + key / kWidth * (deep * kWidth) + key % kWidth;
    multiply(panel, 1, kWidth, queries, deep * kWidth, kWidth, deep, sums);
    if (key + kTall > tile.all_before || key < tile.all_from)
      for (int i = 0; i < kTall; ++i)
        for (int v = 0; v < vectors; ++v) {
          const V own = all(float(key + i)), not_behind = load(tile.to + v * kWidth);
          sums[i][v] = where_at_most(own, not_behind, sums[i][v], all(-kInfinity));
          sums[i][v] = where_at_most(load(tile.from + v * kWidth), own, sums[i][v], all(-kInfinity));
        }
    for (int i = 0; i < kTall; ++i)
      for (int v = 0; v < vectors; ++v) {
        largest[v] = larger(largest[v], sums[i][v]);
        store(scores + ((r + i) * vectors + v) * kWidth, sums[i][v]);
      }
  }
}

template <class F>
INLINE inline void by_vectors(int64_t lanes, const F& f) {
  if (lanes <= kWidth) f(std::integral_constant<int, 1>{});
  else if (lanes <= 2 * kWidth) f(std::integral_constant<int, 2>{});
  else f(std::integral_constant<int, 3>{});
}
"""
)
