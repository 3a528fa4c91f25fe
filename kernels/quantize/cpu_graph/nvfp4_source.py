"""The C++ of NVFP4: rounding to it, the random bits that it may draw, and the Hadamard transform before it."""

NVFP4_SCALE = r"""namespace te_models {

inline float global_encode(float amax) {
  float encode = 2688.0f / amax;
  encode = encode == std::numeric_limits<float>::infinity() ? kLargest : encode;
  return amax == 0.0f || !finite(amax) ? 1.0f : encode;
}

inline Scale nvfp4_scale(float block_amax, float encode) {  // encode: global_encode of the matrix
  const float decode = 1.0f / encode;
  const float scale = rounded_fp8<false>(block_amax * (encode * float(1.0 / 6.0)));
  const float factor = 1.0f / (scale * decode);
  return {factor > kLargest ? kLargest : factor, scale};
}

inline void nvfp4_scales(const uint32_t* m, int64_t count, float encode, float* before, float* after) {
#pragma omp simd
  for (int64_t b = 0; b < count; ++b) {
    const Scale scale = nvfp4_scale(float_of(m[b]), encode);
    before[b] = scale.before, after[b] = scale.after;
  }
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

// What rounds stochastically in vectors, with random bits that lie in memory: of the element in row r and column c of a
// matrix at matrix * size + r * down + c * along.
struct Drawn {
  const int32_t* random;
  int64_t size, down, along;
  INLINE Floats operator()(Floats magnitude, int64_t matrix, int64_t r, int64_t c) const {
    const int32_t* const first = random + matrix * size + r * down + c * along;
    if (along == 1) return drawn<E2M1>(magnitude, load<Words>(first));
    int32_t lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = first[i * along];
    return drawn<E2M1>(magnitude, load<Words>(lanes));
  }
};

}  // namespace te_models
using namespace te_models;

extern "C" void te_round_nvfp4(const X* x, Y* out, int64_t B, int64_t R, int64_t C, int64_t br, int64_t bc,
                               const float* amax, int64_t by_matrix, int64_t by_row, int64_t by_column,
                               const int32_t* random, int threads) {
  const int64_t across = (C + bc - 1) / bc;
  const auto scales = [=](const uint32_t* m, int64_t matrix, int64_t row, float* before, float* after) {
    const float* const first = amax + matrix * by_matrix + row * by_row;
    if (by_column == 0) return nvfp4_scales(m, across, global_encode(*first), before, after);
    for (int64_t b = 0; b < across; ++b)
      nvfp4_scales(m + b, 1, global_encode(first[b * by_column]), before + b, after + b);
  };
  // a multiple of 1/2 below 8 times one of 2^-9 with four bits is a number of bfloat16
  const auto exact = [](float) { return true; };
  if (random == nullptr) {
    const auto nearest = [](float v, int64_t, int64_t, int64_t) { return rounded_e2m1<false>(v, 0); };
    stripes(x, out, B, R, C, br, bc, threads, scales, nearest, Nearest<E2M1>{}, exact);
    return;
  }
  // blocks down the rows have the random bits of the transpose
  const int64_t down = bc == 1 ? 1 : C, along = bc == 1 ? R : 1;
  const auto stochastic = [=](float v, int64_t matrix, int64_t r, int64_t c) {
    return rounded_e2m1<true>(v, random[matrix * R * C + r * down + c * along]);
  };
  const Drawn in_lanes{random, R * C, down, along};
  stripes(x, out, B, R, C, br, bc, threads, scales, stochastic, in_lanes, exact);
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
  constexpr int64_t groups = 4, width = groups * kPairs;  // enough at once that no multiplication waits for another
  const int64_t counters = (size + 3) / 4;
#pragma omp parallel for num_threads(threads)
  for (int64_t begin = 0; begin < counters; begin += width) {
    Pairs c0[groups], c1[groups], c2[groups], c3[groups];  // of which the lower words count
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t i = 0; i < kPairs; ++i) c0[g][i] = uint32_t(begin + g * kPairs + i);
      c1[g] = Pairs{} + uint32_t(stream);
      c2[g] = Pairs{} + uint32_t(uint64_t(step));
      c3[g] = Pairs{} + uint32_t(uint64_t(step) >> 32);
    }
    uint32_t k0 = uint32_t(uint64_t(seed)), k1 = uint32_t(uint64_t(seed) >> 32);
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
      for (int64_t g = 0; g < groups; ++g) {
        const Pairs p0 = product(c0[g], 0xD2511F53u), p1 = product(c2[g], 0xCD9E8D57u);
        c0[g] = (p1 >> 32) ^ c1[g] ^ k0;
        c1[g] = p1;
        c2[g] = (p0 >> 32) ^ c3[g] ^ k1;
        c3[g] = p0;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    uint64_t words[2 * width];
    for (int64_t g = 0; g < groups; ++g) {
      uint64_t first[kPairs], second[kPairs];
      store(first, (c0[g] & 0xFFFFFFFF) | c1[g] << 32);
      store(second, (c2[g] & 0xFFFFFFFF) | c3[g] << 32);
      for (int64_t i = 0; i < kPairs; ++i) {
        words[2 * (g * kPairs + i)] = first[i];
        words[2 * (g * kPairs + i) + 1] = second[i];
      }
    }
    std::memcpy(to + 4 * begin, words, 4 * std::min(4 * width, size - 4 * begin));
  }
}
"""
)
