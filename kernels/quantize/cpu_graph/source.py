"""The C++ of the operations that quantize in a CPU graph: one pass over a stripe of blocks after the other.

Each is compiled once for a format and the dtypes of its input and its result (`INPUT`, `RESULT`).

A transcription of the definitions in `fp8.reference`, `fp8.rounding`, `nvfp4.reference`, `hadamard` and `random`, in
the same float32 arithmetic and the same order, so with the same bits; what each step is for is said there. Matrices are
contiguous: B of them, R rows, C columns. A stripe is the blocks that lie side by side: `br` rows.
"""

from ... import cpp_numbers

NUMBERS = (
    cpp_numbers.NUMBERS
    + r"""
constexpr float kLargest = std::numeric_limits<float>::max();

using Y = RESULT;

inline bool finite(float f) { return (bits_of(f) & 0x7F800000) != 0x7F800000; }
inline float with_sign(float magnitude, float sign) {
  return float_of((bits_of(magnitude) & 0x7FFFFFFF) | (bits_of(sign) & 0x80000000));
}
inline float clamped(float v, float limit) {  // a NaN stays
  v = v > limit ? limit : v;
  return v < -limit ? -limit : v;
}

template <bool e5m2>
inline float rounded_fp8(float v) {
  v = clamped(v, e5m2 ? 57344.0f : 448.0f);
  const float m = v * (e5m2 ? 0x1p21f : 0x1p20f);
  const float normal = m - (m - v);
  const float constant = e5m2 ? 0x1.8p7f : 0x1.8p14f;
  const float subnormal = (v + constant) - constant;
  return with_sign(std::fabs(v) < (e5m2 ? 0x1p-14f : 0x1p-6f) ? subnormal : normal, v);
}

// The largest magnitude of each block of a stripe: of `height` rows of C columns, in blocks of bc columns.
inline void largest_magnitudes(const X* x, int64_t height, int64_t C, int64_t bc, uint32_t* m) {
  const int64_t across = (C + bc - 1) / bc;
  std::fill(m, m + across, 0u);
  for (int64_t r = 0; r < height; ++r) {
    const X* const row = x + r * C;
    if (bc == 1) {
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) {  // not std::max: the loop is not vectorized over its reference
        const uint32_t former = m[c], found = X::magnitude(row[c]);
        m[c] = found > former ? found : former;
      }
      continue;
    }
    for (int64_t b = 0; b < across; ++b) {
      const int64_t stop = std::min((b + 1) * bc, C);
      uint32_t found = m[b];
#pragma omp simd reduction(max : found)
      for (int64_t c = b * bc; c < stop; ++c) found = std::max(found, X::magnitude(row[c]));
      m[b] = found;
    }
  }
}

struct Scale {
  float before, after;  // multiplied with before the rounding, and after it
};

}  // namespace te_models
"""
)

COMMON = (
    NUMBERS
    + r"""namespace te_models {

// Round every stripe: scale_of(magnitude, matrix, block row, block column), round(value, matrix, row, column).
template <class ScaleOf, class Round>
void stripes(const X* x, Y* out, int64_t B, int64_t R, int64_t C, int64_t br, int64_t bc, int threads,
             const ScaleOf& scale_of, const Round& round) {
  const int64_t down = (R + br - 1) / br, across = (C + bc - 1) / bc;
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint32_t> largest(across);
    std::vector<float> before(across), after(across);
    uint32_t* const m = largest.data();
    float* const s = before.data();
    float* const t = after.data();
#pragma omp for
    for (int64_t stripe = 0; stripe < B * down; ++stripe) {
      const int64_t matrix = stripe / down, block_row = stripe % down;
      const int64_t begin = block_row * br, end = std::min(begin + br, R);
      largest_magnitudes(x + (matrix * R + begin) * C, end - begin, C, bc, m);
      for (int64_t b = 0; b < across; ++b) {
        const Scale scale = scale_of(float_of(m[b]), matrix, block_row, b);
        s[b] = scale.before;
        t[b] = scale.after;
      }
      for (int64_t r = begin; r < end; ++r) {
        const X* const row = x + (matrix * R + r) * C;
        Y* const to = out + (matrix * R + r) * C;
        if (bc == 1) {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) to[c] = Y::write(round(X::read(row[c]) * s[c], matrix, r, c) * t[c]);
          continue;
        }
        for (int64_t b = 0; b < across; ++b) {
          const int64_t stop = std::min((b + 1) * bc, C);
          const float scale = s[b], inverse = t[b];
#pragma omp simd
          for (int64_t c = b * bc; c < stop; ++c)
            to[c] = Y::write(round(X::read(row[c]) * scale, matrix, r, c) * inverse);
        }
      }
    }
  }
}

}  // namespace te_models
using namespace te_models;

// [rows, columns] -> the largest magnitude of each row
extern "C" void te_row_amax(const X* x, float* out, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t c = 0; c < columns; ++c) largest = std::max(largest, X::magnitude(x[r * columns + c]));
    out[r] = float_of(largest);
  }
}
"""
)

FP8_SCALE = r"""namespace te_models {

inline float power_of_two(int32_t biased) { return float_of(uint32_t(std::max(biased << 23, 0x00400000))); }

enum Kind { kFloat32, kPow2, kE8m0 };

template <bool e5m2>
inline Scale fp8_scale(float amax, int kind, float epsilon, float overflow) {
  const float limit = e5m2 ? 57344.0f : 448.0f;
  if (kind == kE8m0) {
    const float needed = amax * float(1.0 / double(limit));
    const int32_t bits = needed <= 0x1p-127f ? 0 : int32_t(bits_of(needed));
    const int32_t byte = std::min((bits + 0x007FFFFF) >> 23, 254);
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

}  // namespace te_models
"""

FP8 = (
    FP8_SCALE
    + r"""namespace te_models {

template <bool e5m2>
void round_fp8(const X* x, Y* out, int64_t B, int64_t R, int64_t C, int64_t br, int64_t bc, int kind, float epsilon,
               float overflow, int threads) {
  stripes(
      x, out, B, R, C, br, bc, threads,
      [=](float amax, int64_t, int64_t, int64_t) { return fp8_scale<e5m2>(amax, kind, epsilon, overflow); },
      [](float v, int64_t, int64_t, int64_t) { return rounded_fp8<e5m2>(v); });
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
#pragma omp parallel for simd num_threads(threads)
    for (int64_t i = 0; i < size; ++i) to[i] = Y::write(rounded_fp8<e5m2>(X::read(from[i]) * before));
  }
}

// A given scale for each row, or (by_row 0) for all.
template <bool e5m2>
void round_scaled(const X* x, Y* out, int64_t R, int64_t C, const float* scale, int64_t by_row, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < R; ++r) {
    const X* const from = x + r * C;
    Y* const to = out + r * C;
    const float before = scale[r * by_row];
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) to[c] = Y::write(rounded_fp8<e5m2>(X::read(from[c]) * before));
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

NVFP4_SCALE = r"""namespace te_models {

inline float global_encode(float amax) {
  float encode = 2688.0f / amax;
  encode = encode == std::numeric_limits<float>::infinity() ? kLargest : encode;
  return amax == 0.0f || !finite(amax) ? 1.0f : encode;
}

inline Scale nvfp4_scale(float block_amax, float amax) {
  const float encode = global_encode(amax), decode = 1.0f / encode;
  const float scale = rounded_fp8<false>(block_amax * (encode * float(1.0 / 6.0)));
  const float factor = 1.0f / (scale * decode);
  return {factor > kLargest ? kLargest : factor, scale};
}

}  // namespace te_models
"""

NVFP4 = (
    NVFP4_SCALE
    + r"""namespace te_models {

template <bool stochastic>
inline float rounded_e2m1(float v, int32_t random) {
  v = clamped(v, 6.0f);
  const float m = std::fabs(v);
  const float step = m < 2.0f ? 0.5f : (m < 4.0f ? 1.0f : 2.0f);
  const float ratio = m * (m < 2.0f ? 2.0f : (m < 4.0f ? 1.0f : 0.5f));
  float multiple;
  if (stochastic) {
    const float below = std::floor(ratio);
    const float drawn = float((random >> 8) & 0xFFFFFF) * 0x1p-24f;
    multiple = below + (drawn < ratio - below ? 1.0f : 0.0f);
  } else {
    multiple = std::nearbyint(ratio);
  }
  return with_sign(multiple * step, v);
}

}  // namespace te_models
using namespace te_models;

extern "C" void te_round_nvfp4(const X* x, Y* out, int64_t B, int64_t R, int64_t C, int64_t br, int64_t bc,
                               const float* amax, int64_t by_matrix, int64_t by_row, int64_t by_column,
                               const int32_t* random, int threads) {
  const auto scale_of = [=](float largest, int64_t matrix, int64_t row, int64_t column) {
    return nvfp4_scale(largest, amax[matrix * by_matrix + row * by_row + column * by_column]);
  };
  if (random == nullptr) {
    stripes(x, out, B, R, C, br, bc, threads, scale_of,
            [](float v, int64_t, int64_t, int64_t) { return rounded_e2m1<false>(v, 0); });
    return;
  }
  // blocks down the rows have the random bits of the transpose
  const int64_t down = bc == 1 ? 1 : C, along = bc == 1 ? R : 1;
  stripes(x, out, B, R, C, br, bc, threads, scale_of, [=](float v, int64_t matrix, int64_t r, int64_t c) {
    return rounded_e2m1<true>(v, random[matrix * R * C + r * down + c * along]);
  });
}

// what decoding multiplies with, of each amax
extern "C" void te_global_decode(const float* amax, float* to, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = 1.0f / global_encode(amax[i]);
}

// bfloat16 [B, R, C] -> [B, R rounded up to 16, C]; signs: 16 factors of +-1/4
extern "C" void te_random_hadamard(const BFloat16* from, BFloat16* to, int64_t B, int64_t R, int64_t C,
                                   const float* signs, int threads) {
  constexpr int64_t width = 64;
  const int64_t groups = (R + 15) / 16, parts = (C + width - 1) / width;
#pragma omp parallel for num_threads(threads)
  for (int64_t task = 0; task < B * groups * parts; ++task) {
    const int64_t part = task % parts, group = task / parts % groups, matrix = task / parts / groups;
    const int64_t begin = part * width, count = std::min(width, C - begin);
    float members[16][width] = {};
    for (int i = 0; i < 16 && group * 16 + i < R; ++i) {
      const BFloat16* const row = from + (matrix * R + group * 16 + i) * C + begin;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) members[i][c] = BFloat16::read(row[c]) * signs[i];
    }
    for (int h = 1; h < 16; h *= 2)
      for (int i = 0; i < 16; ++i)
        if (!(i & h))
#pragma omp simd
          for (int64_t c = 0; c < width; ++c) {
            const float a = members[i][c], b = members[i | h][c];
            members[i][c] = a + b;
            members[i | h][c] = a - b;
          }
    for (int i = 0; i < 16; ++i) {
      BFloat16* const row = to + ((matrix * groups + group) * 16 + i) * C + begin;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) row[c] = BFloat16::write(members[i][c]);
    }
  }
}

// int32 words of Philox4x32-10, four of each counter (i, stream, low, high)
extern "C" void te_random_bits(uint32_t* to, int64_t size, int64_t seed, int64_t step, int64_t stream, int threads) {
  constexpr int64_t width = 64;
  const int64_t counters = (size + 3) / 4;
#pragma omp parallel for num_threads(threads)
  for (int64_t begin = 0; begin < counters; begin += width) {
    uint32_t c0[width], c1[width], c2[width], c3[width];
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      c0[i] = uint32_t(begin + i);
      c1[i] = uint32_t(stream);
      c2[i] = uint32_t(uint64_t(step));
      c3[i] = uint32_t(uint64_t(step) >> 32);
    }
    uint32_t k0 = uint32_t(uint64_t(seed)), k1 = uint32_t(uint64_t(seed) >> 32);
    for (int round = 0; round < 10; ++round) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const uint64_t p0 = uint64_t(c0[i]) * 0xD2511F53u, p1 = uint64_t(c2[i]) * 0xCD9E8D57u;
        c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
        c1[i] = uint32_t(p1);
        c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
        c3[i] = uint32_t(p0);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int64_t i = 0; i < width && begin + i < counters; ++i) {
      const uint32_t words[4] = {c0[i], c1[i], c2[i], c3[i]};
      const int64_t at = 4 * (begin + i);
      for (int64_t w = 0; w < 4 && at + w < size; ++w) to[at + w] = words[w];
    }
  }
}
"""
)
