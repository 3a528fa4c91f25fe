"""The C++ of rounding to FP8: with a scale per block, one of the matrix's own, or one that is known."""

FP8_SCALE = r"""namespace te_models {

inline float power_of_two(int32_t biased) { return float_of(uint32_t(std::max(biased << 23, 0x00400000))); }

enum Kind { kFloat32, kPow2, kE8m0 };

template <bool e5m2>
inline Scale fp8_scale(float amax, int kind, float epsilon, float overflow) {
  const float limit = e5m2 ? 57344.0f : 448.0f;
  if (kind == kE8m0) {
    const float needed = amax * float(1.0 / double(limit));
    const uint32_t bits = needed <= 0x1p-127f ? 0 : bits_of(needed);  // of NaN with a sum beyond int32_t
    const int32_t byte = std::min(int32_t((bits + 0x007FFFFF) >> 23), 254);
    const bool nan = amax != amax;
    const float none = std::numeric_limits<float>::quiet_NaN();
    return {nan ? none : power_of_two(254 - byte), nan ? none : power_of_two(byte)};
  }
  const float bounded = amax < epsilon ? epsilon : amax;
  float scale = limit / bounded;
  scale = scale == std::numeric_limits<float>::infinity() ? overflow : scale;
  scale = bounded == 0.0f || !finite(bounded) ? 1.0f : scale;
  if (kind == kPow2) scale = float_of(bits_of(scale) & 0x7F800000);
  return {scale, 1.0f / scale};
}

template <bool e5m2>
inline void fp8_scales(const uint32_t* m, int64_t count, int kind, float epsilon, float overflow, float* before,
                       float* after) {
  const auto of_kind = [=](int each) {  // a loop for each, of which vectors are made
#pragma omp simd
    for (int64_t b = 0; b < count; ++b) {
      const Scale scale = fp8_scale<e5m2>(float_of(m[b]), each, epsilon, overflow);
      before[b] = scale.before, after[b] = scale.after;
    }
  };
  kind == kE8m0 ? of_kind(kE8m0) : kind == kPow2 ? of_kind(kPow2) : of_kind(kFloat32);
}

template <bool e5m2>
using Fp8 = std::conditional_t<e5m2, E5M2, E4M3>;

// Numbers times one scale. Of a part that holds one that is not finite, all are rounded one by one.
template <bool e5m2>
inline void round_row(const X* from, Y* to, int64_t count, float scale) {
  constexpr int64_t part = 1024;
  const bool positive = scale > 0.0f && finite(scale);
  for (int64_t begin = 0; begin < count; begin += part) {
    const int64_t stop = std::min(begin + part, count);
    Words any{};
    int64_t c = begin;
    for (; positive && c + kLanes <= stop; c += kLanes) {
      const Words u = read_bits(from + c), magnitude = u & 0x7FFFFFFF;
      any = larger(any, magnitude);
      write<true>(to + c, with_sign(Rounded<Fp8<e5m2>>(float_of(magnitude) * scale).value, u));
    }
    if (largest_of(any) >= 0x7F800000) c = begin;
#pragma omp simd
    for (int64_t i = c; i < stop; ++i) to[i] = Y::write(rounded_fp8<e5m2>(X::read(from[i]) * scale));
  }
}

}  // namespace te_models
"""

FP8 = (
    FP8_SCALE
    + r"""namespace te_models {

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
  for (int64_t r = 0; r < R; ++r) {
    round_row<e5m2>(x + r * C, out + r * C, C, scale[r * by_row]);
  }
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
"""
)
