// Attention of one query of each head to cached keys: x86 with AVX2, twice as wide with AVX-512.
//
// Keys and values are read once, in the order in which they lie in memory, all heads of a position after one another;
// the heads that share a key use it while it is in registers. The softmax goes on as keys come (arXiv 1805.02867), 256
// of them at a time, in float32; sums are float32, over the lanes of a vector, then over these, and rounded once. X is
// the dtype of queries, keys, values and the result.

#include "simd.h"

namespace te_models {

constexpr int64_t kKeys = 256;  // whose scores are there together
constexpr int64_t kAhead = 8;  // positions that are read before they are needed
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// e^x for x <= 0, of which rounding leaves 2e-7 of the value; 0 below -87.
inline float exponential(float x) {
  const float times = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounded to an integer by where its bits end
  const float rest = (x - times * 0.693359375f) + times * 2.12194440e-4f;
  float p = rest * (1.0f / 5040) + 1.0f / 720;
  p = ((((p * rest + 1.0f / 120) * rest + 1.0f / 24) * rest + 1.0f / 6) * rest + 0.5f) * rest + 1.0f;
  p = p * rest + 1.0f;
  const float found = p * float_of(uint32_t(int32_t(times) + 127) << 23);
  return x > -87.0f ? found : x == x ? 0.0f : x;
}

struct Cache {  // keys or values: elements from row to row of the batch, from position to position, from head to head
  const X* data;
  int64_t row, position, head;
};

struct Sizes {
  int64_t keys, shared, D, Dv;  // shared: queries of a key head
  float scale;
};

// Have memory bring the channels of a position.
INLINE inline void soon_all(const X* p, int64_t channels) {
  constexpr int64_t line = 64 / sizeof(X);
  for (int64_t i = 0; i < channels; i += line) soon(p + i);
}

// scores [queries of a head, kKeys] of `count` keys
inline void score(const X* key, int64_t step, int64_t count, const float* q, const Sizes& s, float* scores) {
  for (int64_t l = 0; l < count; ++l) {
    const X* const k = key + l * step;
    soon_all(k + kAhead * step, s.D);
    for (int64_t h = 0; h < s.shared; ++h) {
      Floats a = zero(), b = zero();
      const float* const own = q + h * s.D;
      int64_t d = 0;
      for (; d + 2 * kLanes <= s.D; d += 2 * kLanes) {
        a = fma(widened(k + d), load(own + d), a);
        b = fma(widened(k + d + kLanes), load(own + d + kLanes), b);
      }
      if (d < s.D) a = fma(widened(k + d), load(own + d), a);
      scores[h * kKeys + l] = sum(add(a, b)) * s.scale;
    }
  }
}

// out [queries of a head, Dv] += weights [queries of a head, kKeys] of `together` keys times their values
template <int together>
INLINE inline void add_some(const X* v, int64_t step, const float* weights, const Sizes& s, float* out) {
  for (int64_t h = 0; h < s.shared; ++h) {
    Floats weight[together];
    for (int i = 0; i < together; ++i) weight[i] = all(weights[h * kKeys + i]);
    for (int64_t d = 0; d < s.Dv; d += kLanes) {
      float* const to = out + h * s.Dv + d;
      Floats sum = load(to);
      for (int i = 0; i < together; ++i) sum = fma(widened(v + i * step + d), weight[i], sum);
      store(to, sum);
    }
  }
}

inline void add_values(const X* value, int64_t step, int64_t count, const float* weights, const Sizes& s, float* out) {
  int64_t l = 0;
  for (; l + 4 <= count; l += 4) {
    for (int i = 0; i < 4; ++i) soon_all(value + (l + i + kAhead) * step, s.Dv);
    add_some<4>(value + l * step, step, weights + l, s, out);
  }
  for (; l < count; ++l) add_some<1>(value + l * step, step, weights + l, s, out);
}

// q, out: of the queries of key heads first to end of one row of the batch; hidden: one byte for each key, or null
inline void attend(const X* q, Cache key, Cache value, const uint8_t* visible, X* out, int64_t first, int64_t end,
                   const Sizes& s) {
  const int64_t queries = (end - first) * s.shared;
  std::vector<float> wide(queries * s.D), scores(s.shared * kKeys), total(queries * s.Dv), sums(queries);
  std::vector<float> most(queries, kNothing);
  const int64_t begin = first * s.shared;
  for (int64_t i = 0; i < queries * s.D; ++i) wide[i] = X::read(q[begin * s.D + i]);
  for (int64_t block = 0; block < s.keys; block += kKeys) {
    int64_t l = block, end_of_keys = std::min(block + kKeys, s.keys);
    if (visible != nullptr) {  // what comes before the first visible key and behind the last one is not read
      const void* const some = std::memchr(visible + l, 1, end_of_keys - l);
      if (some == nullptr) continue;
      l = static_cast<const uint8_t*>(some) - visible;
      while (!visible[end_of_keys - 1]) --end_of_keys;
    }
    const int64_t count = end_of_keys - l;
    for (int64_t g = first; g < end; ++g) {
      const int64_t own = (g - first) * s.shared;
      score(key.data + l * key.position + g * key.head, key.position, count, wide.data() + own * s.D, s, scores.data());
      for (int64_t h = 0; h < s.shared; ++h) {
        float* const of_head = scores.data() + h * kKeys;
        float highest = most[own + h];
        if (visible != nullptr)
          for (int64_t i = 0; i < count; ++i) of_head[i] = visible[l + i] ? of_head[i] : kNothing;
        bool number = true;
        for (int64_t i = 0; i < count; ++i) {
          highest = std::max(highest, of_head[i]);
          number &= of_head[i] == of_head[i];
        }
        if (!number) highest = std::numeric_limits<float>::quiet_NaN();  // a comparison leaves NaN out
        if (highest == kNothing) {  // none is visible so far
          std::fill_n(of_head, count, 0.0f);
          continue;
        }
        const float before = most[own + h] == kNothing ? 0.0f : exponential(most[own + h] - highest);
        float sum_of_keys = sums[own + h] * before;
        for (int64_t i = 0; i < count; ++i)
          of_head[i] = of_head[i] == kNothing ? 0.0f : exponential(of_head[i] - highest);
        for (int64_t i = 0; i < count; ++i) sum_of_keys += of_head[i];
        if (before != 1.0f)
          for (int64_t d = 0; d < s.Dv; ++d) total[(own + h) * s.Dv + d] *= before;
        sums[own + h] = sum_of_keys;
        most[own + h] = highest;
      }
      add_values(value.data + l * value.position + g * value.head, value.position, count, scores.data(), s,
                 total.data() + own * s.Dv);
    }
  }
  for (int64_t h = 0; h < queries; ++h) {
    const float by = most[h] == kNothing ? 0.0f : 1.0f / sums[h];  // a query that sees no key: zeros
    for (int64_t d = 0; d < s.Dv; ++d) out[(begin + h) * s.Dv + d] = X::write(total[h * s.Dv + d] * by);
  }
}

}  // namespace te_models
using namespace te_models;

// q [B, N, D], out [B, N, Dv]: contiguous; keys [B, L, G, D], values [B, L, G, Dv]: channels contiguous; visible [B or
// 1, L] or null
extern "C" void te_attend_one(const X* q, const X* key, int64_t k_row, int64_t k_position, int64_t k_head,
                              const X* value, int64_t v_row, int64_t v_position, int64_t v_head, const uint8_t* visible,
                              int64_t visible_row, X* out, int64_t B, int64_t L, int64_t G, int64_t shared, int64_t D,
                              int64_t Dv, float scale, int threads) {
  const Sizes sizes{L, shared, D, Dv, scale};
  const int64_t parts = B >= threads ? 1 : std::min<int64_t>(G, threads), share = (G + parts - 1) / parts;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < B * parts; ++i) {
    const int64_t b = i / parts, first = i % parts * share;
    attend(q + b * G * shared * D, {key + b * k_row, k_row, k_position, k_head},
           {value + b * v_row, v_row, v_position, v_head}, visible == nullptr ? nullptr : visible + b * visible_row,
           out + b * G * shared * Dv, std::min(first, G), std::min(first + share, G), sizes);
  }
}
