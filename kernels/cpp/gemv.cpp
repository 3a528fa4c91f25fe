// A product of a few rows by a weight in high precision: x86 with AVX2, twice as wide with AVX-512.
//
// X is the dtype of the rows, of the weight and of the result. The weight is read once, a row at a time from front to
// back, which is what memory does fastest: a CPU's GEMM reads a few rows side by side, or copies them into tiles
// first, at half that speed or less. Every sum runs over the lanes of four vectors in turn, then over these: it does
// not depend on how many rows there are. Sums are float32 and rounded once.

#include "simd.h"

namespace te_models {

constexpr int kSums = 4;
constexpr int64_t kAhead = 2048;  // bytes that are read before they are needed, of rows to come, too

// Have memory bring some bytes that follow later: a processor that multiplies waits for what it has not asked for.
template <int64_t size>
INLINE inline void ahead(const X* w) {
  for (int64_t i = 0; i < size; i += 64) soon(reinterpret_cast<const char*>(w) + kAhead + i);
}

#if defined(WIDE)
constexpr bool kHalves = false;
#else
constexpr bool kHalves = X::rounds;
// Two bfloat16 lie in each lane of what is read: the lower is shifted up, the upper masked, where spreading eight over
// a vector takes three times as long. Sums of even and of odd columns are put side by side at the end, so that every
// sum runs in the same order.
INLINE inline Floats evens(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
INLINE inline Floats odds(__m256i x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xFFFF0000))));
}
INLINE inline void side_by_side(Floats& a, Floats& b) {
  const Floats low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  a = _mm256_permute2f128_ps(low, high, 0x20);
  b = _mm256_permute2f128_ps(low, high, 0x31);
}
#endif

// `count` rows of x, each of `padded` floats as `copy_row` puts them, by a row of the weight -> out [count].
template <int count>
INLINE inline void by_row(const float* x, int64_t padded, const X* w, int64_t K, float* out) {
  Floats acc[count][kSums];
  for (int m = 0; m < count; ++m)
    for (int i = 0; i < kSums; ++i) acc[m][i] = zero();
  int64_t k = 0;
  for (; k + kSums * kLanes <= K; k += kSums * kLanes) {
    ahead<kSums * kLanes * sizeof(X)>(w + k);
    Floats some[kSums];
#if !defined(WIDE)
    if constexpr (kHalves)
      for (int i = 0; i < kSums; i += 2) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + k + i * kLanes));
        some[i] = evens(pairs);
        some[i + 1] = odds(pairs);
      }
    else
#endif
      for (int i = 0; i < kSums; ++i) some[i] = widened(w + k + i * kLanes);
    for (int m = 0; m < count; ++m)
      for (int i = 0; i < kSums; ++i) acc[m][i] = fma(load(x + m * padded + k + i * kLanes), some[i], acc[m][i]);
  }
#if !defined(WIDE)
  if constexpr (kHalves)
    for (int m = 0; m < count; ++m)
      for (int i = 0; i < kSums; i += 2) side_by_side(acc[m][i], acc[m][i + 1]);
#endif
  for (; k < K; k += kLanes) {
    X last[kLanes] = {};
    const X* from = w + k;
    if (K - k < kLanes) {  // past the end there may be no memory
      std::memcpy(last, from, (K - k) * sizeof(X));
      from = last;
    }
    const Floats one = widened(from);
    for (int m = 0; m < count; ++m) acc[m][0] = fma(load(x + m * padded + k), one, acc[m][0]);
  }
  for (int m = 0; m < count; ++m) out[m] = sum(add(add(acc[m][0], acc[m][1]), add(acc[m][2], acc[m][3])));
}

#if defined(__AVX512BF16__) && defined(WIDE)
constexpr bool kPairs = X::rounds;
constexpr int kTogether = kPairs ? 8 : kRows;  // rows of x that share what is read of the weight

// The same of bfloat16, whose products of pairs are added up by one instruction: x, as it is, in rows of `padded`.
template <int count>
INLINE inline void by_row(const X* x, int64_t padded, const X* w, int64_t K, float* out) {
  constexpr int width = 2 * kLanes;
  __m512 acc[count][2];
  for (auto& some : acc) some[0] = some[1] = zero();
  const auto pairs = [](const X* p) INLINE { return __m512bh(_mm512_loadu_si512(p)); };
  int64_t k = 0;
  for (; k + 2 * width <= K; k += 2 * width) {
    ahead<2 * width * sizeof(X)>(w + k);
    const __m512bh a = pairs(w + k), b = pairs(w + k + width);
#pragma GCC unroll 8
    for (int m = 0; m < count; ++m) {
      acc[m][0] = _mm512_dpbf16_ps(acc[m][0], a, pairs(x + m * padded + k));
      acc[m][1] = _mm512_dpbf16_ps(acc[m][1], b, pairs(x + m * padded + k + width));
    }
  }
  for (int i = 0; k < K; k += width, ++i) {
    const __mmask32 there = K - k < width ? (__mmask32(1) << (K - k)) - 1 : ~__mmask32(0);
    const __m512bh last = __m512bh(_mm512_maskz_loadu_epi16(there, w + k));
    for (int m = 0; m < count; ++m) acc[m][i] = _mm512_dpbf16_ps(acc[m][i], last, pairs(x + m * padded + k));
  }
  for (int m = 0; m < count; ++m) out[m] = sum(add(acc[m][0], acc[m][1]));
}
#else
constexpr bool kPairs = false;
constexpr int kTogether = kRows;
#endif

using Row = std::conditional_t<kPairs, X, float>;  // of x, as it is multiplied
constexpr int64_t kPadding = kPairs ? 2 * kLanes : kLanes;

inline void copy_row(const X* from, int64_t K, X* to) { std::memcpy(to, from, K * sizeof(X)); }
inline void copy_row(const X* from, int64_t K, float* to) {
  int64_t k = 0;
  if (kHalves)  // even columns of a pair of vectors, then odd ones
    for (; k + kSums * kLanes <= K; k += kSums * kLanes)
      for (int64_t i = 0; i < kSums * kLanes; ++i)
        to[k + i] = X::read(from[k + i / (2 * kLanes) * 2 * kLanes + i % kLanes * 2 + i / kLanes % 2]);
#pragma omp simd
  for (int64_t i = k; i < K; ++i) to[i] = X::read(from[i]);
}

inline void rows_by_weight(const Row* x, int64_t padded, const X* bias, X* out, int64_t M, int64_t begin, int64_t end,
                           int64_t N, int64_t K, const X* data, int64_t stride) {
  for (int64_t n = begin; n < end; ++n) {
    const float b = bias == nullptr ? 0.0f : X::read(bias[n]);
    for (int64_t m = 0; m < M; m += kTogether) {
      float found[kTogether];
      const int count = int(std::min<int64_t>(kTogether, M - m));
      with_count<kTogether>(count, [&](auto c) INLINE {
        by_row<decltype(c)::value>(x + m * padded, padded, data + n * stride, K, found);
      });
      for (int i = 0; i < count; ++i) out[(m + i) * N + n] = X::write(bias == nullptr ? found[i] : found[i] + b);
    }
  }
}

}  // namespace te_models
using namespace te_models;

// x [M, K] contiguous, bias [N] or null, out [M, N], data [N, K] with rows `stride` apart
extern "C" void te_rows(const X* x, const X* bias, X* out, int64_t M, int64_t N, int64_t K, const X* data,
                        int64_t stride, int threads) {
  const int64_t padded = (K + kPadding - 1) / kPadding * kPadding, share = (N + threads - 1) / threads;
  std::vector<Row> rows(M * padded);
  for (int64_t m = 0; m < M; ++m) copy_row(x + m * K, K, rows.data() + m * padded);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t begin = 0; begin < N; begin += share)
    rows_by_weight(rows.data(), padded, bias, out, M, begin, std::min(begin + share, N), N, K, data, stride);
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
