// A product of a few rows by a quantized weight: x86 with AVX2, twice as wide with AVX-512.
//
// FORMAT is the format of the weight (E4M3, E5M2, E2M1, INT4, INT8), X the dtype of the rows and of the result. A
// weight is decoded in registers, in the order of operations of its `dequantize`, so to the same bits; for several
// rows, some rows of the weight lie decoded in the first-level cache. Every sum runs over the lanes of one vector, then
// over these: it does not depend on how many rows there are.

#include "few_rows_decode.h"
#include "few_rows_lookup.h"
#ifdef OF_INTEGERS
#include "few_rows_integers.h"
#else
#if defined(OF_BYTES) && !defined(WIDE)
constexpr int64_t kStep = 32;
inline int64_t place_of(int64_t k) { return k / 32 * 32 + k % 4 * 8 + k % 32 / 4; }  // as `decode_fours` has them
#else
constexpr int64_t kStep = 16;
inline int64_t place_of(int64_t k) { return k; }
#endif
#endif

using namespace te_models;

#if defined(OF_BYTES)
constexpr int kTogether = 4;  // rows of the weight: fewer sums would wait for what was added to them before
#else
constexpr int kTogether = kRows;
#endif

// One row of x, `wide`: the weight is decoded in registers.
static void one_row(const float* wide, const X* bias, X* out, int64_t N, const Weight& w, const Tables& tables,
                    int threads) {
#pragma omp parallel num_threads(threads)
  {
    Rows rows = rows_of(tables);
#pragma omp for
    for (int64_t n = 0; n < N; n += kTogether) {
      Floats acc[kTogether];
      const auto restart = [&]() INLINE { each_row<kTogether>([&](auto r) INLINE { acc[r] = zero(); }); };
      restart();
      rows.decode<kTogether>(w, n, N, restart,
                             [&](int64_t k, auto r, Floats v) INLINE { acc[r] = fma(v, load(wide + k), acc[r]); });
      for (int r = 0; r < kTogether && n + r < N; ++r) {
        const float y = sum(acc[r]);
        out[n + r] = X::write(bias == nullptr ? y : y + X::read(bias[n + r]));
      }
    }
  }
}

// x [M, K] contiguous, bias [N] or null, out [M, N], amax: NVFP4's, the zero points of integers, or null
extern "C" void te_few_rows(const X* x, const X* bias, X* out, int64_t M, int64_t N, int64_t K, const uint8_t* data,
                            int64_t stride, const void* scale, int64_t down, int64_t across, int64_t block_rows,
                            int64_t block_columns, int kind, const float* amax, int threads) {
  const Weight w{data, stride, scale, down, across, block_rows, block_columns, K, kind};
  if (kLooksUp && looked_up(x, bias, out, M, N, w, threads)) return;
  const Tables tables(w, amax);
  const int64_t padded = (K + kStep - 1) / kStep * kStep;
  std::vector<float> wide(M * padded);
  for (int64_t m = 0; m < M; ++m)
#pragma omp simd
    for (int64_t k = 0; k < K; ++k) wide[m * padded + place_of(k)] = X::read(x[m * K + k]);
  if (M == 1) return one_row(wide.data(), bias, out, N, w, tables, threads);
#pragma omp parallel num_threads(threads)
  {
    Rows rows = rows_of(tables);
    std::vector<float> decoded(kRows * padded), found(M * kRows);
    float* const to = decoded.data();
#pragma omp for
    for (int64_t n = 0; n < N; n += kRows) {
      rows.decode<kRows>(w, n, N, [] {}, [&](int64_t k, auto r, Floats v) INLINE { store(to + r * padded + k, v); });
      for (int64_t m = 0; m < M; m += 4) {
        const auto run = M - m == 1 ? several<1> : M - m == 2 ? several<2> : M - m == 3 ? several<3> : several<4>;
        run(to, wide.data() + m * padded, padded, found.data() + m * kRows);
      }
      for (int64_t m = 0; m < M; ++m)
        for (int r = 0; r < kRows && n + r < N; ++r) {
          float y = found[m * kRows + r];
          if (bias != nullptr) y += X::read(bias[n + r]);
          out[m * N + n + r] = X::write(y);
        }
    }
  }
}

// The same for rows of several matrices. groups: of each, which matrix it is, its first row in x, and how many rows it
// has; *_member: bytes from matrix to matrix.
extern "C" void te_few_rows_of_groups(const X* x, X* out, const int64_t* groups, int64_t count, int64_t N, int64_t K,
                                      const uint8_t* data, int64_t data_member, int64_t stride, const uint8_t* scale,
                                      int64_t scale_member, int64_t down, int64_t across, int64_t block_rows,
                                      int64_t block_columns, int kind, const uint8_t* amax, int64_t amax_member,
                                      int threads) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t g = groups[3 * i], first = groups[3 * i + 1], rows = groups[3 * i + 2];
    te_few_rows(x + first * K, nullptr, out + first * N, rows, N, K, data + g * data_member, stride,
                scale + g * scale_member, down, across, block_rows, block_columns, kind,
                amax == nullptr ? nullptr : reinterpret_cast<const float*>(amax + g * amax_member), threads);
  }
}
