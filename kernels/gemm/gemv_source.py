"""The C++ of a product of a few rows by a weight in high precision: x86 with AVX2, twice as wide with AVX-512.

X is the dtype of the rows, of the weight and of the result. The weight is read once, a row at a time from front to
back, which is what memory does fastest: a CPU's GEMM reads a few rows side by side, or copies them into tiles first,
at half that speed or less. Every sum runs over the lanes of four vectors in turn, then over these: it does not depend
on how many rows there are. Sums are float32 and rounded once.
"""

from .vectors import VECTORS

SOURCE = (
    VECTORS
    + r"""
constexpr int kSums = 4;

// `count` rows of x, each of `padded` floats, by a row of the weight -> out [count].
template <int count>
INLINE void by_row(const float* x, int64_t padded, const X* w, int64_t K, float* out) {
  V acc[count][kSums];
  for (int m = 0; m < count; ++m)
    for (int i = 0; i < kSums; ++i) acc[m][i] = zero();
  int64_t k = 0;
  for (; k + kSums * kWidth <= K; k += kSums * kWidth) {
    V some[kSums];
    for (int i = 0; i < kSums; ++i) some[i] = widened(w + k + i * kWidth);
    for (int m = 0; m < count; ++m)
      for (int i = 0; i < kSums; ++i) acc[m][i] = fma(load(x + m * padded + k + i * kWidth), some[i], acc[m][i]);
  }
  for (; k < K; k += kWidth) {
    X last[kWidth] = {};
    const X* from = w + k;
    if (K - k < kWidth) {  // past the end there may be no memory
      std::memcpy(last, from, (K - k) * sizeof(X));
      from = last;
    }
    const V one = widened(from);
    for (int m = 0; m < count; ++m) acc[m][0] = fma(load(x + m * padded + k), one, acc[m][0]);
  }
  for (int m = 0; m < count; ++m) out[m] = sum(add(add(acc[m][0], acc[m][1]), add(acc[m][2], acc[m][3])));
}

inline void rows_by_weight(const float* x, int64_t padded, const X* bias, X* out, int64_t M, int64_t begin, int64_t end,
                           int64_t N, int64_t K, const X* data, int64_t stride) {
  for (int64_t n = begin; n < end; ++n) {
    const float b = bias == nullptr ? 0.0f : X::read(bias[n]);
    for (int64_t m = 0; m < M; m += kRows) {
      float found[kRows];
      const float* const from = x + m * padded;
      const X* const w = data + n * stride;
      const int count = int(std::min<int64_t>(kRows, M - m));
      if (count == 1) by_row<1>(from, padded, w, K, found);
      else if (count == 2) by_row<2>(from, padded, w, K, found);
      else if (count == 3) by_row<3>(from, padded, w, K, found);
      else by_row<4>(from, padded, w, K, found);
      for (int i = 0; i < count; ++i) out[(m + i) * N + n] = X::write(bias == nullptr ? found[i] : found[i] + b);
    }
  }
}

}  // namespace te_models
using namespace te_models;

// x [M, K] contiguous, bias [N] or null, out [M, N], data [N, K] with rows `stride` apart
extern "C" void te_rows(const X* x, const X* bias, X* out, int64_t M, int64_t N, int64_t K, const X* data,
                        int64_t stride, int threads) {
  const int64_t padded = (K + kWidth - 1) / kWidth * kWidth;
  std::vector<float> wide(M * padded);
  for (int64_t m = 0; m < M; ++m)
#pragma omp simd
    for (int64_t k = 0; k < K; ++k) wide[m * padded + k] = X::read(x[m * K + k]);
  if (threads == 1) return rows_by_weight(wide.data(), padded, bias, out, M, 0, N, N, K, data, stride);
  const int64_t share = (N + threads - 1) / threads;
#pragma omp parallel for num_threads(threads)
  for (int64_t begin = 0; begin < N; begin += share)
    rows_by_weight(wide.data(), padded, bias, out, M, begin, std::min(begin + share, N), N, K, data, stride);
}

// The same for rows of several matrices, `member` elements apart. groups: of each, which matrix it is, its first row in
// x, and how many rows it has.
extern "C" void te_rows_of_groups(const X* x, X* out, const int64_t* groups, int64_t count, int64_t N, int64_t K,
                                  const X* data, int64_t member, int64_t stride, int threads) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t g = groups[3 * i], first = groups[3 * i + 1];
    te_rows(x + first * K, nullptr, out + first * N, groups[3 * i + 2], N, K, data + g * member, stride, threads);
  }
}
"""
)
