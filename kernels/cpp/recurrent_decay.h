// How a state decays within a chunk: by one factor for each token of a head, or by one for each channel of keys.
//
// Both compute the same things of a chunk: rows decayed from its beginning on (`enter`) and to its end (`leave`), the
// products of all pairs of tokens (`weigh`), sums over the tokens before or behind each one (`add_before`,
// `add_behind`), and the gradient of the decay's logarithm. All factors are 1 or less, so that nothing overflows.

#pragma once

#include "recurrent.h"

namespace te_models {

constexpr int64_t kBlock = kLanes;  // tokens, whose pairs are multiplied one by one where each channel decays
constexpr int64_t kBlocks = kChunk / kBlock;
constexpr float kForgotten = -104.0f;  // whose exponential is 0; of sums with less, differences would be NaN
constexpr int kTogether = 4;  // keys that a query is multiplied by together

inline void fill_causal(float* pairs) {
  for (int64_t i = 0; i < kChunk; ++i)
    for (int64_t j = 0; j < kChunk; ++j) pairs[i * kChunk + j] = j <= i ? 1.0f : 0.0f;
}

struct HeadDecay {
  const int64_t K;
  Buffer passed = buffer(K), across = buffer(K * kChunk);
  float total[kChunk], entered[kChunk], left[kChunk];
  float pairs[kChunk * kChunk];  // [i][j], what reaches token i of token j, zeros where j is behind i
  double of_total = 0.0;
  explicit HeadDecay(int64_t channels) : K(channels) {}
  static int64_t width(const Shape&) { return 1; }

  void read(const float* g, int64_t stride, int64_t count, int64_t, int64_t) {
    double sum_of_g = 0.0;  // of up to kChunk, whose differences are read
    for (int64_t i = 0; i < kChunk; ++i) {
      if (i < count) sum_of_g += std::max(g[i * stride], kForgotten);
      total[i] = float(sum_of_g);
    }
    const Floats last = all(total[kChunk - 1]);
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      store(entered + i, exponential(load(total + i)));
      store(left + i, exponential(sub(last, load(total + i))));
    }
    std::fill_n(passed.get(), K, entered[kChunk - 1]);
  }
  INLINE Floats entered_at(int64_t i, int64_t) const { return all(entered[i]); }
  INLINE Floats left_at(int64_t i, int64_t) const { return all(left[i]); }

  void weigh(const float* q, const float* k, int64_t rows, const float* scales, const float* beta, float* reads,
             float* system) {
    float places[kChunk];
    for (int64_t i = 0; i < kChunk; ++i) places[i] = float(i);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < kChunk; j += kLanes) {
        const Floats e = j > i ? zero() : exponential(sub(all(total[i]), load(total + j)));
        store(pairs + i * kChunk + j, where_at_most(load(places + j), all(float(i)), e, zero()));
      }
    transposed(k, kChunk, K, K, across.get(), kChunk);
    multiply_pairs(q, K, across.get(), K, pairs, scales, rows, reads);
    if (system != nullptr) multiply_pairs(k, K, across.get(), K, pairs, beta, rows, system);
  }

  void add_before(const float* weights, const float* x, int64_t rows, float* out) const {
    product(
        rows, K,
        [&](int64_t r, int64_t c, Sums& sums) INLINE {
          take(out, K, r, c, sums);
          add(weights, kChunk, 1, x, K, r, c, 0, r + kTall, sums);
        },
        [&](int64_t r, int64_t c, Sums& sums) INLINE { put(out, K, r, c, sums); });
  }
  void add_behind(const float* weights, const float* x, int64_t rows, float* out) const {
    product(
        rows, K,
        [&](int64_t r, int64_t c, Sums& sums) INLINE {
          take(out, K, r, c, sums);
          add(weights, 1, kChunk, x, K, r, c, r, rows, sums);
        },
        [&](int64_t r, int64_t c, Sums& sums) INLINE { put(out, K, r, c, sums); });
  }

  void begin_gradient(const float* of_state, const float* state, int64_t values) {
    of_total = dot_rows(of_state, state, K * values);
  }
  void gradient(const float* q, const float* of_q, const float* k, const float* of_read, const float* of_written,
                int64_t, float* to) {
    of_total += dot_rows(q, of_q, K) - dot_rows(k, of_written, K);
    if (of_read != nullptr) of_total += dot_rows(k, of_read, K);
    *to = float(of_total);
  }
};

// Of two blocks, all that reaches the later one from the earlier passes the border before the later one, and the decay
// splits there into two factors. Within a block, a row is decayed token by token.
struct ChannelDecay {
  const int64_t K;
  Buffer steps = buffer(kChunk * K);  // the factor of each token,
  Buffer inner = buffer(kChunk * K);  // of all from the beginning of its block on, its own included,
  Buffer right = buffer(kChunk * K);  // and of all behind it in its block
  Buffer factor = buffer(kBlocks * K), before = buffer(kBlocks * K), behind = buffer(kBlocks * K);  // of blocks
  Buffer passed = buffer(K), across = buffer(K * kChunk), rows_of_block = buffer(kBlock * K);
  float pairs[kChunk * kChunk];
  std::vector<double> of_total;
  explicit ChannelDecay(int64_t channels) : K(channels), of_total(channels) { fill_causal(pairs); }
  static int64_t width(const Shape& s) { return s.K; }

  void read(const float* g, int64_t stride, int64_t count, int64_t channels, int64_t rows) {
    copy_rows(g, stride, count, channels, K, steps.get());
    const int64_t blocks = rows / kBlock;
    for (int64_t c = 0; c < K; c += kLanes) {
      Floats so_far = all(1.0f), from_here = all(1.0f);
      for (int64_t b = 0; b < blocks; ++b) {
        Floats of_block = all(1.0f);
        for (int64_t at = b * kBlock * K + c, i = 0; i < kBlock; ++i, at += K) {
          const Floats e = exponential(load(steps.get() + at));
          of_block = mul(of_block, e);
          store(steps.get() + at, e);
          store(inner.get() + at, of_block);
        }
        store(factor.get() + b * K + c, of_block);
        store(before.get() + b * K + c, so_far);
        so_far = mul(so_far, of_block);
      }
      store(passed.get() + c, so_far);
      for (int64_t b = blocks - 1; b >= 0; --b) {
        Floats of_block = all(1.0f);
        for (int64_t at = ((b + 1) * kBlock - 1) * K + c, i = 0; i < kBlock; ++i, at -= K) {
          store(right.get() + at, of_block);
          of_block = mul(of_block, load(steps.get() + at));
        }
        store(behind.get() + b * K + c, from_here);
        from_here = mul(from_here, of_block);
      }
    }
  }
  INLINE Floats entered_at(int64_t i, int64_t c) const {
    return mul(load(inner.get() + i * K + c), load(before.get() + i / kBlock * K + c));
  }
  INLINE Floats left_at(int64_t i, int64_t c) const {
    return mul(load(right.get() + i * K + c), load(behind.get() + i / kBlock * K + c));
  }

  void weigh(const float* q, const float* k, int64_t rows, const float* scales, const float* beta, float* reads,
             float* system) {
    float* const keys = across.get();  // [K][kChunk], decayed to the beginning of a block; zeros from there on
    std::fill_n(keys, K * kChunk, 0.0f);
    for (int64_t r = 0; r < rows; r += kBlock) {
      multiply_earlier(q, r, scales, reads);
      if (system != nullptr) multiply_earlier(k, r, beta, system);
      multiply_within(q, k, r, scales, beta, reads, system);
      for (int64_t c = 0; c < K; ++c) {
        const Floats decay = all(factor[r / kBlock * K + c]);
        for (int64_t j = 0; j < r; j += kLanes) store(keys + c * kChunk + j, mul(load(keys + c * kChunk + j), decay));
      }
      transposed(rows_of_block.get(), kBlock, K, K, keys + r, kChunk);
    }
  }
  // the products of the rows of a block with the keys of all earlier ones
  void multiply_earlier(const float* x, int64_t r, const float* factors, float* to) {
    if (r == 0) return;
    float* const entered = rows_of_block.get();
    for (int64_t i = 0; i < kBlock * K; i += kLanes)
      store(entered + i, mul(load(x + r * K + i), load(inner.get() + r * K + i)));
    for (int64_t c = 0; c < r; c += kAcross)
      for (int64_t i = 0; i < kBlock; i += kTall) {
        Sums sums;
        for (int t = 0; t < kTall; ++t) sums[t][0] = sums[t][1] = zero();
        add(entered, K, 1, across.get(), kChunk, i, c, 0, K, sums);
        times(factors + r + i, sums);
        put(to, kChunk, r + i, c, sums);
      }
  }
  // the products of the rows of a block with each other; its keys, decayed to its end, -> rows_of_block
  void multiply_within(const float* q, const float* k, int64_t r, const float* scales, const float* beta, float* reads,
                       float* system) {
    float* const keys = rows_of_block.get();
    std::fill_n(keys, kBlock * K, 0.0f);
    for (int64_t i = 0; i < kBlock; ++i) {
      const float *const query = q + (r + i) * K, *const key = k + (r + i) * K;
      const float* const next = i + 1 < kBlock ? steps.get() + (r + i + 1) * K : nullptr;
      std::copy_n(key, K, keys + i * K);
      const int64_t row = (r + i) * kChunk + r;
      for (int64_t j = 0; j < kBlock; j += kTogether) {
        Floats read[kTogether], written[kTogether];
        for (int t = 0; t < kTogether; ++t) read[t] = written[t] = zero();
        for (int64_t c = 0; c < K && j <= i; c += kLanes) {
          const Floats a = load(query + c), b = load(key + c), decay = next == nullptr ? all(1.0f) : load(next + c);
#pragma GCC unroll 4
          for (int t = 0; t < kTogether; ++t) {
            float* const at = keys + (j + t) * K + c;
            const Floats x = load(at);
            read[t] = fma(a, x, read[t]);
            written[t] = fma(b, x, written[t]);
            store(at, mul(x, decay));
          }
        }
        for (int t = 0; t < kTogether; ++t) {
          reads[row + j + t] = scales[r + i] * sum(read[t]);
          if (system != nullptr) system[row + j + t] = beta[r + i] * sum(written[t]);
        }
      }
    }
  }

  void add_before(const float* weights, const float* x, int64_t rows, float* out) const {
    for (int64_t c = 0; c < K; c += kAcross) {
      float decayed[kChunk * kAcross];  // to the beginning of a block
      for (int64_t r = 0; r < rows; r += kBlock) {
        add_blocks(weights, kChunk, 1, decayed, r, c, 0, r, inner.get(), out);
        for (int v = 0; v < 2; ++v)
          before_within(weights, x, r, c + v * kLanes, decayed + r * kAcross + v * kLanes, out);
        decay_rows(decayed, 0, r, r, c);
      }
    }
  }
  void add_behind(const float* weights, const float* x, int64_t rows, float* out) const {
    for (int64_t c = 0; c < K; c += kAcross) {
      float decayed[kChunk * kAcross];  // from the end of a block
      for (int64_t r = rows - kBlock; r >= 0; r -= kBlock) {
        add_blocks(weights, 1, kChunk, decayed, r, c, r + kBlock, rows, right.get(), out);
        for (int v = 0; v < 2; ++v)
          behind_within(weights, x, r, c + v * kLanes, decayed + r * kAcross + v * kLanes, out);
        decay_rows(decayed, r + kBlock, rows, r, c);
      }
    }
  }
  // rows of a block of out += factors times the sum over the tokens from begin to end
  INLINE void add_blocks(const float* weights, int64_t row, int64_t step, const float* decayed, int64_t r, int64_t c,
                         int64_t begin, int64_t end, const float* factors, float* out) const {
    if (begin == end) return;
    for (int64_t i = r; i < r + kBlock; i += kTall) {
      Sums sums, some;
      for (int t = 0; t < kTall; ++t) some[t][0] = some[t][1] = zero();
      add(weights, row, step, decayed, kAcross, i, 0, begin, end, some);
      take(out, K, i, c, sums);
      for (int t = 0; t < kTall; ++t)
        for (int v = 0; v < 2; ++v)
          sums[t][v] = fma(load(factors + (i + t) * K + c + v * kLanes), some[t][v], sums[t][v]);
      put(out, K, i, c, sums);
    }
  }
  INLINE void before_within(const float* weights, const float* x, int64_t r, int64_t c, float* to, float* out) const {
    Floats rows[kBlock];
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i) {
      const int64_t at = (r + i) * K + c;
      const Floats decay = load(steps.get() + at);
      Floats found = load(out + at);
#pragma GCC unroll 16
      for (int j = 0; j < i; ++j) {
        rows[j] = mul(rows[j], decay);
        found = fma(all(weights[(r + i) * kChunk + r + j]), rows[j], found);
      }
      rows[i] = load(x + at);
      store(out + at, fma(all(weights[(r + i) * kChunk + r + i]), rows[i], found));
    }
    for (int i = 0; i < kBlock; ++i) store(to + i * kAcross, rows[i]);
  }
  INLINE void behind_within(const float* weights, const float* x, int64_t r, int64_t c, float* to, float* out) const {
    Floats rows[kBlock];
#pragma GCC unroll 16
    for (int j = kBlock - 1; j >= 0; --j) {
      const int64_t at = (r + j) * K + c;
      const Floats decay = load(steps.get() + at);
      Floats found = load(out + at);
      rows[j] = load(x + at);
#pragma GCC unroll 16
      for (int i = j; i < kBlock; ++i) {
        found = fma(all(weights[(r + i) * kChunk + r + j]), rows[i], found);
        rows[i] = mul(rows[i], decay);
      }
      store(out + at, found);
    }
    for (int i = 0; i < kBlock; ++i) store(to + i * kAcross, rows[i]);
  }
  INLINE void decay_rows(float* decayed, int64_t begin, int64_t end, int64_t r, int64_t c) const {
    for (int v = 0; v < 2; ++v) {
      const Floats decay = load(factor.get() + r / kBlock * K + c + v * kLanes);
      for (int64_t i = begin; i < end; ++i) {
        float* const at = decayed + i * kAcross + v * kLanes;
        store(at, mul(load(at), decay));
      }
    }
  }

  void begin_gradient(const float* of_state, const float* state, int64_t values) {
    for (int64_t c = 0; c < K; ++c) of_total[c] = 0.0;
    for (int64_t d = 0; d < values; ++d)
      for (int64_t c = 0; c < K; ++c) of_total[c] += double(of_state[d * K + c] * state[d * K + c]);
  }
  void gradient(const float* q, const float* of_q, const float* k, const float* of_read, const float* of_written,
                int64_t channels, float* to) {
    for (int64_t c = 0; c < channels; ++c) {
      of_total[c] += double(q[c] * of_q[c] - k[c] * of_written[c]);
      if (of_read != nullptr) of_total[c] += double(k[c] * of_read[c]);
      to[c] = float(of_total[c]);
    }
  }
};

// to = factors times rows of x, decayed from the beginning of the chunk on
template <class Decay>
void enter(const Decay& decay, const float* x, const float* factors, int64_t rows, float* to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < decay.K; c += kLanes)
      store(to + i * decay.K + c, mul(mul(load(x + i * decay.K + c), all(factors[i])), decay.entered_at(i, c)));
}

// to = rows of x, decayed to the end of the chunk
template <class Decay>
void leave(const Decay& decay, const float* x, int64_t rows, float* to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < decay.K; c += kLanes)
      store(to + i * decay.K + c, mul(load(x + i * decay.K + c), decay.left_at(i, c)));
}

}  // namespace te_models
