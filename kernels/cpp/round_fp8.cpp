// Rounding to FP8: with a scale per block, one of the matrix's own, or one that is known.

#include "stripes.h"
#include "fp8.h"

namespace te_models {

template <bool e5m2>
void round_fp8(const X* x, Y* out, int64_t B, int64_t R, int64_t C, int64_t br, int64_t bc, int kind, float epsilon,
               float overflow, int threads) {
  const int64_t across = (C + bc - 1) / bc;
  stripes(
      x, out, B, R, C, br, bc, threads,
      [=](const uint32_t* m, int64_t, int64_t, float* before, float* after) {
        fp8_scales<e5m2>(m, across, kind, epsilon, overflow, before, after);
      },
      [](float v, const uint32_t*) { return rounded_fp8<e5m2>(v); }, Nearest<Fp8<e5m2>>{},
      // multiples of 2^-9 or 2^-16 times a power of two are numbers of bfloat16, of which the least is 2^-133
      [=](float scale) { return kind != kFloat32 && scale >= 0x1p-117f; }, NoRandomWords{});
}

}  // namespace te_models
using namespace te_models;

// One scale for a matrix, from its own amax; scale_inv: of each matrix.
template <bool e5m2>
void round_current(const X* x, Y* out, float* scale_inv, int64_t B, int64_t size, int kind, float epsilon,
                   int threads) {
  for (int64_t matrix = 0; matrix < B; ++matrix) {
    const X* const from = x + matrix * size;
    Y* const to = out + matrix * size;
    uint32_t largest = 0;
#pragma omp parallel for simd num_threads(threads) reduction(max : largest)
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, X::magnitude(from[i]));
    const Scale scale = fp8_scale<e5m2>(float_of(largest), kind, epsilon, kLargest);
    scale_inv[matrix] = scale.after;
    const float before = scale.before;
    constexpr int64_t part = 1 << 14;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < size; i += part) round_row<e5m2>(from + i, to + i, std::min(part, size - i), before);
  }
}

// A given scale for each row, or (by_row 0) for all.
template <bool e5m2>
void round_scaled(const X* x, Y* out, int64_t R, int64_t C, const float* scale, int64_t by_row, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < R; ++r) { round_row<e5m2>(x + r * C, out + r * C, C, scale[r * by_row]); }
}

extern "C" void te_round_current(const X* x, Y* out, float* scale_inv, int64_t B, int64_t size, int e5m2, int kind,
                                 float epsilon, int threads) {
  const auto round = e5m2 ? round_current<true> : round_current<false>;
  round(x, out, scale_inv, B, size, kind, epsilon, threads);
}

extern "C" void te_round_scaled(const X* x, Y* out, int64_t R, int64_t C, const float* scale, int64_t by_row, int e5m2,
                                int threads) {
  const auto round = e5m2 ? round_scaled<true> : round_scaled<false>;
  round(x, out, R, C, scale, by_row, threads);
}

extern "C" void te_round_fp8(const X* x, Y* out, int64_t B, int64_t R, int64_t C, int64_t br, int64_t bc, int e5m2,
                             int kind, float epsilon, float overflow, int threads) {
  const auto round = e5m2 ? round_fp8<true> : round_fp8<false>;
  round(x, out, B, R, C, br, bc, kind, epsilon, overflow, threads);
}
