// What both passes of flash attention are made of: packed operands, and products of tiles.
//
// A tile has the queries of some positions, all heads that share a key head beside each other, in the lanes of three
// vectors. So what is done to a query (its largest score, its sum, its mask) is one instruction for a vector of them,
// nothing is added up across lanes, and a tile of g heads has fewer positions that see different keys.
//
// A product reads one operand a vector at a time and the other a unit at a time (`attention_units.h`), in panels of as
// many rows or columns as a vector has lanes, so that both are read front to back.

#pragma once

#include "attention_units.h"

namespace te_models {

constexpr int kVectors = 3;               // of a tile
constexpr int kTall = kLanes / 2;         // rows of a product whose sums are in registers, with three vectors each
constexpr int kTileLanes = kVectors * kLanes;
constexpr int64_t kKeys = 128;            // of a block: a tile's scores with all of them are there at one time

inline int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float[], Free>;
inline Buffer buffer(int64_t units) {
  return Buffer(static_cast<float*>(std::aligned_alloc(64, up_to(std::max<int64_t>(units, 1) * 4, 64))));
}

// Rows of at most a vector's lanes -> a panel [values / kDeep][kLanes]: row i in lane i, units of neighbours in a row.
inline void pack_across(const X* const* rows, int count, int64_t values, float* to) {
  const int64_t deep = values / kDeep;
  for (int64_t at = 0; at < deep; at += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, deep - at);
    Floats r[kLanes];
    for (int i = 0; i < kLanes; ++i) r[i] = i < count ? units(rows[i] + at * kDeep, some) : zero();
    transpose(r);
    for (int64_t i = 0; i < some; ++i) store(to + (at + i) * kLanes, r[i]);
  }
}

// One row, or two that are neighbours in a sum -> row `at` of each panel [deep][kLanes] of their columns.
inline void pack_down(const X* row, const X* next, int64_t values, int64_t deep, int64_t at, float* to) {
  for (int64_t c = 0; c < values; c += kLanes) store(to + c * deep + at * kLanes, columns(row + c, next + c));
}

// sums[r][v] += the sum over d of a[r * a_row + d * a_step] times the vector at b[v * b_vector + d * b_step]
template <int rows, int vectors>
INLINE inline void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_vector,
                            int64_t b_step, int64_t deep, Floats (&sums)[rows][vectors]) {
  for (int64_t d = 0; d < deep; ++d, a += a_step, b += b_step) {
    Floats x[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) x[v] = load(b + v * b_vector);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const Floats y = all(a[r * a_row]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[r][v] = dot(y, x[v], sums[r][v]);
    }
  }
}

// results [values][vectors * kLanes] = them times `factor`, or zero at first, plus the sum over keys of their rows, in
// panels of `all_deep` units, times weights [keys / kDeep][vectors * kLanes]
template <int vectors>
INLINE inline void add_rows(const float* keys, int64_t all_deep, const float* weights, int64_t deep, int64_t count,
                            const Floats (&factor)[vectors], bool first, float* results) {
  for (int64_t c = 0; c < count; c += kTall) {
    Floats sums[kTall][vectors];
    float* const place = results + c * vectors * kLanes;
    for (int i = 0; i < kTall; ++i)
      for (int v = 0; v < vectors; ++v)
        sums[i][v] = first ? zero() : mul(load(place + (i * vectors + v) * kLanes), factor[v]);
    const float* const panel = keys + c / kLanes * (all_deep * kLanes) + c % kLanes;
    multiply(panel, 1, kLanes, weights, kLanes, vectors * kLanes, deep, sums);
    for (int i = 0; i < kTall; ++i)
      for (int v = 0; v < vectors; ++v) store(place + (i * vectors + v) * kLanes, sums[i][v]);
  }
}

// Where rows [values] of one head lie, elements apart: of a batch, of a position, of a head.
struct Strides {
  int64_t batch, position, head;
};

// What scores are multiplied by, above zero. softcap: 0, or what they become softcap * tanh(score / softcap) of. Their
// exponentials are powers of two of `of_power` times what `scores_of` computes.
struct Scale {
  float scale, of_cap, of_power;
  Scale() = default;
  Scale(float factor, float softcap)
      : scale(factor), of_cap(softcap == 0.0f ? 0.0f : 2.0f * kLog2E * (factor / softcap)),
        of_power(kLog2E * (softcap == 0.0f ? factor : softcap)) {}
};

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
  float from[kTileLanes], to[kTileLanes];  // of each query the first key and the last one
  Tile(const Sizes& s, int64_t first_row, int64_t rows) : begin(first_row), count(rows) {
    for (int64_t i = 0; i < kTileLanes; ++i) {
      const int64_t position = (begin + std::min(i, count - 1)) / s.shared();
      const int64_t last = s.causal ? s.keys - s.queries + position : s.keys - 1;
      to[i] = float(last);
      from[i] = float(s.window ? std::max<int64_t>(0, last - s.window + 1) : 0);
    }
    first = int64_t(from[0]) / kLanes * kLanes;
    all_from = int64_t(from[kTileLanes - 1]);
    all_before = int64_t(to[0]) + 1;
    end = int64_t(to[kTileLanes - 1]) + 1;
  }
};

template <class T>
inline T* row_of(T* data, const Strides& strides, const Sizes& s, int64_t batch, int64_t group, int64_t row) {
  const int64_t position = row / s.shared(), head = group * s.shared() + row % s.shared();
  return data + batch * strides.batch + position * strides.position + head * strides.head;
}

// The rows of a tile's queries -> panels [kVectors][values / kDeep][kLanes].
inline void pack_tile(const X* data, const Strides& strides, const Sizes& s, int64_t batch, int64_t group,
                      const Tile& tile, int64_t values, float* to) {
  for (int64_t first = 0; first < tile.count; first += kLanes) {
    const X* rows[kLanes];
    const int count = int(std::min<int64_t>(kLanes, tile.count - first));
    for (int i = 0; i < count; ++i) rows[i] = row_of(data, strides, s, batch, group, tile.begin + first + i);
    pack_across(rows, count, values, to + first * (values / kDeep));
  }
}

// A tile's results [values][vectors * kLanes] times a factor of each query -> `count` rows [values].
inline void unpack_tile(const float* results, X* const* rows, int64_t count, int64_t values, int vectors,
                        const float* factors) {
  for (int64_t first = 0; first < count; first += kLanes)
    for (int64_t c = 0; c < values; c += kLanes) {
      Floats r[kLanes];
      for (int i = 0; i < kLanes; ++i) r[i] = load(results + (c + i) * vectors * kLanes + first);
      transpose(r);
      for (int i = 0; i < kLanes && first + i < count; ++i)
        write(rows[first + i] + c, mul(r[i], all(factors[first + i])));
    }
}

// Keys, or values, of one panel -> [kLanes keys across], for the sums over channels.
inline void pack_keys_across(const X* head, int64_t stride, int64_t keys, int64_t panel, int64_t values, float* to) {
  const X* rows[kLanes];
  const int count = int(std::min<int64_t>(kLanes, keys - panel * kLanes));
  for (int i = 0; i < count; ++i) rows[i] = head + (panel * kLanes + i) * stride;
  pack_across(rows, count, values, to + panel * kLanes * (values / kDeep));
}

// The same keys -> their places in panels of columns, for the sums over keys. deep: units of all keys.
inline void pack_keys_down(const X* head, int64_t stride, int64_t keys, int64_t panel, int64_t values, int64_t deep,
                           float* to) {
  static const X nothing[256] = {};
  for (int64_t i = panel * kLanes; i < (panel + 1) * kLanes; i += kDeep)
    pack_down(i < keys ? head + i * stride : nothing, i + 1 < keys ? head + (i + 1) * stride : nothing, values, deep,
              i / kDeep, to);
}

// Scores of a tile with `rows` keys from `begin` on -> scores [rows][vectors * kLanes], and each query's largest. cap:
// not 0 where they become tanh(score * cap / (2 log2(e))).
template <int vectors>
INLINE inline void scores_of(const Tile& tile, const float* queries, const float* keys, int64_t begin, int64_t rows,
                             int64_t deep, float cap, float* scores, Floats (&largest)[vectors]) {
  for (int64_t r = 0; r < rows; r += kTall) {
    Floats sums[kTall][vectors];
    for (int i = 0; i < kTall; ++i)
      for (int v = 0; v < vectors; ++v) sums[i][v] = zero();
    const int64_t key = begin + r;
    const float* const panel = keys + key / kLanes * (deep * kLanes) + key % kLanes;
    multiply(panel, 1, kLanes, queries, deep * kLanes, kLanes, deep, sums);
    if (cap != 0.0f)
      for (int i = 0; i < kTall; ++i)
        for (int v = 0; v < vectors; ++v) sums[i][v] = tanh_of(mul(sums[i][v], all(cap)));
    if (key + kTall > tile.all_before || key < tile.all_from)
      for (int i = 0; i < kTall; ++i)
        for (int v = 0; v < vectors; ++v) {
          const Floats own = all(float(key + i)), not_behind = load(tile.to + v * kLanes);
          sums[i][v] = where_at_most(own, not_behind, sums[i][v], all(-kInfinity));
          sums[i][v] = where_at_most(load(tile.from + v * kLanes), own, sums[i][v], all(-kInfinity));
        }
    for (int i = 0; i < kTall; ++i)
      for (int v = 0; v < vectors; ++v) {
        largest[v] = larger(largest[v], sums[i][v]);
        store(scores + ((r + i) * vectors + v) * kLanes, sums[i][v]);
      }
  }
}

template <class F>
INLINE inline void by_vectors(int64_t lanes, const F& f) {
  if (lanes <= kLanes) f(std::integral_constant<int, 1>{});
  else if (lanes <= 2 * kLanes) f(std::integral_constant<int, 2>{});
  else f(std::integral_constant<int, 3>{});
}

}  // namespace te_models
