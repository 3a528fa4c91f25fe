// What a layer does to the rows of a matrix between its GEMMs: normalise, activate, rotate, add up.
//
// Every operation is rounded as torch rounds it, one after the other, so that the results are those of the
// definitions, bit for bit; what is saved is memory that each of them would write and the next one read. X is the
// dtype of what is read and written.

#include "numbers.h"

namespace te_models {

// is_number: the value is no NaN, which need not be looked for
template <bool is_number>
inline float rounded(float f) {
  return X::read(X::template write<is_number>(f));
}

constexpr int kLanes = 8, kSums = 4, kLevels = 4;

typedef float V __attribute__((vector_size(4 * kLanes), aligned(4)));  // numbers that are added up side by side
inline V squares(const float* x) {
  const V v = *reinterpret_cast<const V*>(x);
  return v * v;
}

// The sum of the squares of a row in the order of torch's sums of contiguous rows: eight lanes in four interleaved
// sums, which go up a level each time 2^power numbers are in them, and so on.
inline float sum_of_squares(const float* x, int64_t size) {
  if (size < kLanes) {  // lanes of one number
    float sums[kSums] = {};
    int64_t i = 0;
    for (; size >= kSums && i < kSums; ++i) sums[i] = x[i] * x[i];
    for (; i < size; ++i) sums[0] += x[i] * x[i];
    return ((sums[0] + sums[1]) + sums[2]) + sums[3];
  }
  const int64_t vectors = size / kLanes, steps = vectors / kSums;
  int power = 0;
  while ((int64_t(1) << power) < steps) ++power;
  power = std::max(4, power / kLevels);
  const int64_t step = int64_t(1) << power;
  V acc[kLevels][kSums] = {};
  const float* from = x;
  const auto add_up = [&](int64_t count) {
    V a = acc[0][0], b = acc[0][1], c = acc[0][2], d = acc[0][3];
    for (int64_t j = 0; j < count; ++j, from += kSums * kLanes) {
      a = a + squares(from);
      b = b + squares(from + kLanes);
      c = c + squares(from + 2 * kLanes);
      d = d + squares(from + 3 * kLanes);
    }
    acc[0][0] = a, acc[0][1] = b, acc[0][2] = c, acc[0][3] = d;
  };
  int64_t i = 0;
  while (i + step <= steps) {
    add_up(step);
    i += step;
    for (int level = 1; level < kLevels; ++level) {
      for (int s = 0; s < kSums; ++s) {
        acc[level][s] = acc[level][s] + acc[level - 1][s];
        acc[level - 1][s] = V{};
      }
      if ((i & ((step - 1) << (level * power))) != 0) break;
    }
  }
  add_up(steps - i);
  V* const sums = acc[0];
  for (int level = 1; level < kLevels; ++level)
    for (int s = 0; s < kSums; ++s) sums[s] = sums[s] + acc[level][s];
  for (int64_t v = steps * kSums; v < vectors; ++v, from += kLanes) sums[0] = sums[0] + squares(from);
  for (int s = 1; s < kSums; ++s) sums[0] = sums[0] + sums[s];
  float sum = 0;
  for (int64_t k = vectors * kLanes; k < size; ++k) sum += x[k] * x[k];
  for (int k = 0; k < kLanes; ++k) sum += sums[0][k];
  return sum;
}

// Where a row lies: `inner` of them side by side, again and again.
struct Rows {
  int64_t inner, outer_stride, inner_stride;
  int64_t at(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

template <bool is_number>
inline void scaled(const float* x, float scale, const float* gamma, bool weight_last, X* to, int64_t H) {
  if (gamma == nullptr)
    for (int64_t k = 0; k < H; ++k) to[k] = X::template write<is_number>(x[k] * scale);
  else if (weight_last)
    for (int64_t k = 0; k < H; ++k) to[k] = X::template write<is_number>(gamma[k] * rounded<is_number>(x[k] * scale));
  else
    for (int64_t k = 0; k < H; ++k) to[k] = X::template write<is_number>(gamma[k] * (x[k] * scale));
}

}  // namespace te_models
using namespace te_models;

// x: rows of H, weight [H] or null -> out [count, H]. weight_last: rounded before gamma multiplies, else after it.
extern "C" void te_rms_norm(const X* x, const X* weight, X* out, int64_t count, int64_t H, int64_t inner,
                            int64_t outer_stride, int64_t inner_stride, float eps, int zero_centered, int weight_last,
                            int threads) {
  const Rows rows{inner, outer_stride, inner_stride};
  std::vector<float> factors(weight == nullptr ? 0 : H);
  const float* const gamma = weight == nullptr ? nullptr : factors.data();
  bool finite = true;
  for (size_t k = 0; k < factors.size(); ++k) {
    const float one = X::read(weight[k]) + (zero_centered ? 1.0f : 0.0f);
    factors[k] = weight_last ? rounded<false>(one) : one;
    finite &= (bits_of(factors[k]) & 0x7F800000) != 0x7F800000;
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> exact(H);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < count; ++row) {
      const X* const from = x + rows.at(row);
      for (int64_t k = 0; k < H; ++k) exact[k] = X::read(from[k]);
      const float scale = 1.0f / std::sqrt(sum_of_squares(exact.data(), H) / float(H) + eps);
      // a number that is none makes the sum of its row none, and the scale of a row with an infinity is zero
      const bool ordinary = finite && scale > 0 && (bits_of(scale) & 0x7F800000) != 0x7F800000;
      (ordinary ? scaled<true> : scaled<false>)(exact.data(), scale, gamma, weight_last, out + row * H, H);
    }
  }
}

// x: rows of N heads of D channels, the first 2 `half` of which turn; cos, sin [.., half] of a row, again from the
// start after `period` rows -> out [count, D].
extern "C" void te_rotate(const X* x, const float* cosines, const float* sines, X* out, int64_t count, int64_t D,
                          int64_t half, int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t period,
                          int interleaved, int threads) {
  const Rows rows{inner, outer_stride, inner_stride};
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t row = 0; row < count; ++row) {
    const X* const from = x + rows.at(row);
    X* const to = out + row * D;
    const int64_t angle = row / inner % period * half;
    const float* const c = cosines + angle;
    const float* const s = sines + angle;
    if (interleaved) {
      for (int64_t i = 0; i < half; ++i) {
        const float a = X::read(from[2 * i]), b = X::read(from[2 * i + 1]);
        to[2 * i] = X::write(a * c[i] - b * s[i]);
        to[2 * i + 1] = X::write(b * c[i] + a * s[i]);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float a = X::read(from[i]), b = X::read(from[i + half]);
        to[i] = X::write(a * c[i] - b * s[i]);
        to[i + half] = X::write(b * c[i] + a * s[i]);
      }
    }
    std::memcpy(to + 2 * half, from + 2 * half, (D - 2 * half) * sizeof(X));
  }
}

// x: rows of F gates, and of F factors behind them where gated; table: the activation of every number of 16 bits;
// probabilities [count] or null -> out [count, F]
extern "C" void te_activate(const uint16_t* x, const uint16_t* table, const float* probabilities, uint16_t* out,
                            int64_t count, int64_t F, int64_t stride, int gated, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t row = 0; row < count; ++row) {
    const uint16_t* const gate = x + row * stride;
    uint16_t* const to = out + row * F;
    for (int64_t k = 0; k < F; ++k) to[k] = table[gate[k]];
    const auto number = [](uint16_t bits) { return BFloat16::read({bits}); };
    if (gated)
      for (int64_t k = 0; k < F; ++k) to[k] = BFloat16::write(number(to[k]) * number(gate[F + k])).bits;
    if (probabilities != nullptr)
      for (int64_t k = 0; k < F; ++k) to[k] = BFloat16::write(number(to[k]) * probabilities[row]).bits;
  }
}

// y: rows of H; rows [tokens, K]: which of them a token has; weights [tokens, K] or null -> out [tokens, H], the first
// row first, rounded once. Returns 1, having written nothing, where a token has a row that is none of the R.
extern "C" int te_sum_slots(const X* y, const int64_t* rows, const float* weights, X* out, int64_t tokens, int64_t K,
                            int64_t H, int64_t R, int threads) {
  for (int64_t i = 0; i < tokens * K; ++i)
    if (rows[i] < 0 || rows[i] >= R) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> sums(H);
    float* const total = sums.data();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < K; ++k) {
        const X* const from = y + rows[t * K + k] * H;
        const float weight = weights == nullptr ? 1.0f : weights[t * K + k];
        if (k == 0)
          for (int64_t h = 0; h < H; ++h) total[h] = X::read(from[h]) * weight;
        else
          for (int64_t h = 0; h < H; ++h) total[h] += X::read(from[h]) * weight;
      }
      for (int64_t h = 0; h < H; ++h) out[t * H + h] = X::write(total[h]);
    }
  }
  return 0;
}
