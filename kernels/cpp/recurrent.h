// What rules that carry a state compute of a chunk: products of small matrices and triangular systems.
//
// Matrices are rows of floats in buffers, whole vectors long, with zeros behind what there is. A product has kTall rows
// and two vectors of columns in registers at a time; what reads a matrix by columns does it by its strides.

#pragma once

#include "attention_tiles.h"

namespace te_models {

constexpr int64_t kChunk = 64;  // tokens: a square of them stays in the first cache
constexpr int64_t kAcross = 2 * kLanes;

using Sums = Floats[kTall][2];

// Of rows and columns of a product, kTall and kAcross at a time: terms(row, column, sums), then written(...) likewise.
template <class Terms, class Written>
INLINE inline void product(int64_t rows, int64_t columns, const Terms& terms, const Written& written) {
  for (int64_t c = 0; c < columns; c += kAcross)
    for (int64_t r = 0; r < rows; r += kTall) {
      Sums sums;
      for (int i = 0; i < kTall; ++i) sums[i][0] = sums[i][1] = zero();
      terms(r, c, sums);
      written(r, c, sums);
    }
}

// sums += a [rows from r on][begin to end] times b [begin to end][columns from c on]; of(i, d) is a[i * row + d * step]
INLINE inline void add(const float* a, int64_t row, int64_t step, const float* b, int64_t width, int64_t r, int64_t c,
                       int64_t begin, int64_t end, Sums& sums) {
  multiply<kTall, 2>(a + r * row + begin * step, row, step, b + begin * width + c, kLanes, width, end - begin, sums);
}

INLINE inline void times(const float* factors, Sums& sums) {  // of each row
  for (int i = 0; i < kTall; ++i)
    for (int v = 0; v < 2; ++v) sums[i][v] = mul(sums[i][v], all(factors[i]));
}

INLINE inline void put(float* to, int64_t width, int64_t r, int64_t c, const Sums& sums) {
  for (int i = 0; i < kTall; ++i)
    for (int v = 0; v < 2; ++v) store(to + (r + i) * width + c + v * kLanes, sums[i][v]);
}

INLINE inline void take(const float* from, int64_t width, int64_t r, int64_t c, Sums& sums) {
  for (int i = 0; i < kTall; ++i)
    for (int v = 0; v < 2; ++v) sums[i][v] = load(from + (r + i) * width + c + v * kLanes);
}

// state = decay * state + sums, with a decay for each row, or for each column
INLINE inline void put_decayed_rows(float* state, int64_t width, int64_t r, int64_t c, const float* decay,
                                    const Sums& sums) {
  for (int i = 0; i < kTall; ++i)
    for (int v = 0; v < 2; ++v) {
      float* const at = state + (r + i) * width + c + v * kLanes;
      store(at, fma(all(decay[r + i]), load(at), sums[i][v]));
    }
}
INLINE inline void put_decayed_columns(float* state, int64_t width, int64_t r, int64_t c, const float* decay,
                                       const Sums& sums) {
  for (int i = 0; i < kTall; ++i)
    for (int v = 0; v < 2; ++v) {
      float* const at = state + (r + i) * width + c + v * kLanes;
      store(at, fma(load(decay + c + v * kLanes), load(at), sums[i][v]));
    }
}

// from [rows][columns] -> to [columns][rows], both padded to whole vectors
inline void transposed(const float* from, int64_t rows, int64_t columns, int64_t width, float* to, int64_t to_width) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes) {
      Floats t[kLanes];
      for (int i = 0; i < kLanes; ++i) t[i] = load(from + (r + i) * width + c);
      transpose(t);
      for (int i = 0; i < kLanes; ++i) store(to + (c + i) * to_width + r, t[i]);
    }
}

// x = (I + a)^-1 x in place, a [rows][kChunk] below its diagonal; x [rows][columns]
inline void solve(const float* a, float* x, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kAcross)
    for (int64_t r = 0; r < rows; r += kTall) {
      Sums sums, before;
      take(x, columns, r, c, sums);
      for (int i = 0; i < kTall; ++i) before[i][0] = before[i][1] = zero();
      add(a, kChunk, 1, x, columns, r, c, 0, r, before);
#pragma GCC unroll 8
      for (int i = 0; i < kTall; ++i)
        for (int v = 0; v < 2; ++v) {
          sums[i][v] = sub(sums[i][v], before[i][v]);
#pragma GCC unroll 8
          for (int j = 0; j < i; ++j) sums[i][v] = fma(all(-a[(r + i) * kChunk + r + j]), sums[j][v], sums[i][v]);
        }
      put(x, columns, r, c, sums);
    }
}

// as `solve`, of the transposed system
inline void solve_transposed(const float* a, float* x, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kAcross)
    for (int64_t r = rows - kTall; r >= 0; r -= kTall) {
      Sums sums, behind;
      take(x, columns, r, c, sums);
      for (int i = 0; i < kTall; ++i) behind[i][0] = behind[i][1] = zero();
      add(a, 1, kChunk, x, columns, r, c, r + kTall, rows, behind);
#pragma GCC unroll 8
      for (int i = kTall - 1; i >= 0; --i)
        for (int v = 0; v < 2; ++v) {
          sums[i][v] = sub(sums[i][v], behind[i][v]);
#pragma GCC unroll 8
          for (int j = i + 1; j < kTall; ++j)
            sums[i][v] = fma(all(-a[(r + j) * kChunk + r + i]), sums[j][v], sums[i][v]);
        }
      put(x, columns, r, c, sums);
    }
}

// While one is there, results below 2^-126 are zero, as what has decayed is: a processor takes a hundred times as long
// for them.
struct WithoutSubnormals {
  const unsigned before = _mm_getcsr();
  WithoutSubnormals() { _mm_setcsr(before | 0x8040); }
  ~WithoutSubnormals() { _mm_setcsr(before); }
};

INLINE inline Floats exponential(Floats x) { return exp2(mul(x, all(kLog2E))); }

// Rows [tokens][heads][channels] of one head -> [kChunk][width], zeros elsewhere.
inline void copy_rows(const float* from, int64_t stride, int64_t count, int64_t channels, int64_t width, float* to) {
  for (int64_t i = 0; i < kChunk; ++i) {
    const int64_t some = i < count ? channels : 0;
    std::copy_n(from + i * stride, some, to + i * width);
    std::fill_n(to + i * width + some, width - some, 0.0f);
  }
}

inline void scale_rows(float* x, int64_t rows, int64_t width, const float* factors) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < width; c += kLanes) store(x + i * width + c, mul(load(x + i * width + c), all(factors[i])));
}

inline float dot_rows(const float* a, const float* b, int64_t width) {
  Floats found = zero();
  for (int64_t c = 0; c < width; c += kLanes) found = fma(load(a + c), load(b + c), found);
  return sum(found);
}

// products of rows with each other under their decay -> to [rows][kChunk], where a column is not behind its row's block
INLINE inline void multiply_pairs(const float* a, int64_t width, const float* b, int64_t channels, const float* pairs,
                                  const float* factors, int64_t rows, float* to) {
  for (int64_t c = 0; c < rows; c += kAcross)
    for (int64_t r = c / kTall * kTall; r < rows; r += kTall) {
      Sums sums, decay;
      for (int i = 0; i < kTall; ++i) sums[i][0] = sums[i][1] = zero();
      add(a, width, 1, b, kChunk, r, c, 0, channels, sums);
      take(pairs, kChunk, r, c, decay);
      for (int i = 0; i < kTall; ++i)
        for (int v = 0; v < 2; ++v) sums[i][v] = mul(mul(sums[i][v], all(factors[r + i])), decay[i][v]);
      put(to, kChunk, r, c, sums);
    }
}

// B rows, T tokens, H heads of v, `shared` of which have one head of q and k; K and V channels; M documents;
// by_channel: whether each channel of keys has a decay
struct Shape {
  int64_t B, T, H, shared, K, V, M, by_channel;
  float scale;
  const uint8_t* starts;  // [B, T], where a state of zeros begins, or null
  const int64_t* ends;  // [M + 1], where documents of the only row begin, and where the last one ends, or null
  Shape(const void* begins, const void* all_ends, const int64_t* sizes, float factor)
      : B(sizes[0]), T(sizes[1]), H(sizes[2]), shared(sizes[3]), K(sizes[4]), V(sizes[5]), M(sizes[6]),
        by_channel(sizes[7]), scale(factor), starts(static_cast<const uint8_t*>(begins)),
        ends(static_cast<const int64_t*>(all_ends)) {}
  int64_t key_heads() const { return H / shared; }
  int64_t first(int64_t document) const {
    return ends == nullptr ? document * T : std::clamp<int64_t>(ends[document], 0, T);
  }
  int64_t end(int64_t document) const { return first(document + 1); }
  // the chunks of a document as (first token, count), each of one state; a token that starts anew begins one
  std::vector<std::pair<int64_t, int64_t>> chunks(int64_t document) const {
    std::vector<std::pair<int64_t, int64_t>> found;
    const int64_t last = end(document);
    for (int64_t at = first(document); at < last;) {
      int64_t count = 1;
      while (count < kChunk && at + count < last && !anew(at + count)) ++count;
      found.emplace_back(at, count);
      at += count;
    }
    return found;
  }
  bool anew(int64_t token) const { return starts != nullptr && starts[token]; }
};

}  // namespace te_models
