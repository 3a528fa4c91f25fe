"""The C++ of FP8 moments: `layers/optimizers/moments.py` defines them, `quantize/hashed.py` the random bits.

A block is 128 numbers; the last one may have fewer, and counts as filled up with zeros.
"""

MOMENTS = r"""namespace te_models {

constexpr int64_t kBlock = 128;

inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// a magnitude, and a random number in [0, 1) -> an E4M3 number; square: the mean of the square is kept, not 0
template <bool square>
inline float drawn_e4m3(float magnitude, float uniform) {
  const uint32_t exponent = (bits_of(magnitude < 0x1p-6f ? 0x1p-6f : magnitude) >> 23) - 3;
  const float quantum = float_of(exponent << 23), inverse = float_of((254 - exponent) << 23);
  const float below = std::floor(magnitude * inverse) * quantum;
  const float next = below + quantum, above = next > 448.0f ? 448.0f : next;
  if (square) {
    const bool up = uniform * (above * above - below * below) < magnitude * magnitude - below * below;
    return up || (below == 0.0f && magnitude > 0.0f) ? above : below;
  }
  return uniform * (above - below) < magnitude - below ? above : below;
}

// `count` values of one block; returns the largest magnitude's bits
template <bool second>
inline uint32_t encode_block(const float* values, const float* uniform, uint8_t* data, float* scale_inv,
                             int64_t count) {
  float x[kBlock] = {};
  int32_t codes[kBlock];
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    x[i] = second ? std::sqrt(values[i]) : values[i];
    largest = std::max(largest, bits_of(x[i]) & 0x7FFFFFFF);
  }
  const Scale scale = fp8_scale<false>(float_of(largest), kFloat32, 0.0f, kLargest);
  const float before = scale.before;
  *scale_inv = scale.after;
#pragma omp simd
  for (int64_t i = 0; i < kBlock; ++i) {
    const float scaled = clamped(x[i] * before, 448.0f);
    const float rounded = drawn_e4m3<second>(std::fabs(scaled), uniform[i]);
    codes[i] = e4m3_byte(with_sign(rounded, scaled));
  }
#pragma omp simd
  for (int64_t i = 0; i < kBlock; ++i) data[i] = uint8_t(codes[i]);
  return largest;
}

}  // namespace te_models
using namespace te_models;

// both moments of n elements from element `begin` on; returns 1 where a NaN is among them, whose code is another matter
extern "C" int te_encode_moments(const float* first, const float* second, uint8_t* first_data, float* first_scale,
                                 uint8_t* second_data, float* second_scale, int64_t n, int32_t k0, int32_t k1,
                                 int32_t begin, int threads) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  uint32_t any = 0;
#pragma omp parallel for num_threads(threads) reduction(max : any)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * kBlock, count = std::min(kBlock, n - at);
    float low[kBlock], high[kBlock];
#pragma omp simd
    for (int64_t i = 0; i < kBlock; ++i) {
      const uint32_t bits = mixed(mixed((uint32_t(at + i) + uint32_t(begin)) ^ uint32_t(k0)) + uint32_t(k1));
      low[i] = float(int32_t(bits & 0xFFFF)) * 0x1p-16f;
      high[i] = float(int32_t(bits >> 16)) * 0x1p-16f;
    }
    any = std::max(any, encode_block<false>(first + at, low, first_data + at, first_scale + b, count));
    any = std::max(any, encode_block<true>(second + at, high, second_data + at, second_scale + b, count));
  }
  return any > 0x7F800000;
}

extern "C" int te_decode_moments(const uint8_t* first_data, const float* first_scale, const uint8_t* second_data,
                                 const float* second_scale, float* first, float* second, int64_t n, int threads) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * kBlock, stop = std::min(at + kBlock, n);
    const float one = first_scale[b], other = second_scale[b];
#pragma omp simd
    for (int64_t i = at; i < stop; ++i) first[i] = e4m3_value(first_data[i]) * one;
#pragma omp simd
    for (int64_t i = at; i < stop; ++i) {
      const float root = e4m3_value(second_data[i]) * other;
      second[i] = root * root;
    }
  }
  return 0;
}
"""
