"""The C++ of moments in few bits: `layers/optimizers/moments.py` defines them, `quantize/hashed.py` the random bits.

A block is 128 numbers; the last one may have fewer, and counts as filled up with zeros.
"""

MOMENTS = r"""namespace te_models {

constexpr int64_t kBlock = 128;

inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Copy `count` values of a block, or their roots; returns the largest magnitude's bits and the block's scale.
template <bool root>
inline uint32_t read_block(const float* values, int64_t count, float* x, Scale* scale) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    x[i] = root ? std::sqrt(values[i]) : values[i];
    largest = std::max(largest, bits_of(x[i]) & 0x7FFFFFFF);
  }
  for (int64_t i = count; i < kBlock; ++i) x[i] = 0.0f;
  *scale = fp8_scale<false>(float_of(largest), kFloat32, 0.0f, kLargest);
  return largest;
}

// a number times its block's scale, and a random number in [0, 1) -> the byte of an E4M3 number; square: the mean of
// the square is kept, not 0. In units of the quantum, which is exact, the number below is a whole one, `below`.
// In integers where it can be: a compiler makes three branches of a limit on a float, and a vector computes them all.
template <bool square>
inline int32_t code(float x, float scale, float uniform) {
  const uint32_t u = bits_of(x * scale);
  const int32_t unlimited = int32_t(u & 0x7FFFFFFF), magnitude = unlimited < 0x43E00000 ? unlimited : 0x43E00000;
  const int32_t exponent = (magnitude > 0x3C800000 ? magnitude : 0x3C800000) >> 23;
  const float m = float_of(uint32_t(magnitude)) * float_of(uint32_t(257 - exponent) << 23);
  const int32_t below = int32_t(m);
  const float k = float(below);
  const float missing = square ? uniform * (k + k + 1.0f) - (m * m - k * k) : uniform - (m - k);  // negative: up
  const int32_t positive = square ? (below - 1) & -magnitude : 0;  // negative: up, too
  const int32_t up = (int32_t(bits_of(missing)) | positive) >> 31;
  return (below + exponent * 8 - 968 - up) | int32_t(u >> 24 & 0x80);
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
    float x[kBlock], y[kBlock];
    Scale of_first, of_second;
    any = std::max(any, read_block<false>(first + at, count, x, &of_first));
    any = std::max(any, read_block<true>(second + at, count, y, &of_second));
    first_scale[b] = of_first.after, second_scale[b] = of_second.after;
    const float before = of_first.before, before_second = of_second.before;
    const uint32_t counter = uint32_t(at) + uint32_t(begin);
    int32_t codes[kBlock], codes_second[kBlock];
#pragma omp simd
    for (int32_t i = 0; i < int32_t(kBlock); ++i) {
      const uint32_t bits = mixed(mixed((counter + uint32_t(i)) ^ uint32_t(k0)) + uint32_t(k1));
      codes[i] = code<false>(x[i], before, float(int32_t(bits & 0xFFFF)) * 0x1p-16f);
      codes_second[i] = code<true>(y[i], before_second, float(int32_t(bits >> 16)) * 0x1p-16f);
    }
    uint8_t *const to = first_data + at, *const to_second = second_data + at;
#pragma omp simd
    for (int32_t i = 0; i < int32_t(kBlock); ++i) to[i] = uint8_t(codes[i]);
#pragma omp simd
    for (int32_t i = 0; i < int32_t(kBlock); ++i) to_second[i] = uint8_t(codes_second[i]);
  }
  return any > 0x7F800000;
}

// both moments of n elements, rounded to bfloat16; returns 1 where a NaN is among them
extern "C" int te_round_moments(const float* first, const float* second, uint16_t* first_out, uint16_t* second_out,
                                int64_t n, int32_t k0, int32_t k1, int32_t begin, int threads) {
  constexpr int64_t part = 4096;
  uint32_t any = 0;
#pragma omp parallel for num_threads(threads) reduction(max : any)
  for (int64_t at = 0; at < n; at += part) {
    const int32_t count = int32_t(std::min(part, n - at));
    const float *const x = first + at, *const y = second + at;
    uint16_t *const to = first_out + at, *const to_second = second_out + at;
    const uint32_t counter = uint32_t(at) + uint32_t(begin);
#pragma omp simd reduction(max : any)
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t bits = mixed(mixed((counter + uint32_t(i)) ^ uint32_t(k0)) + uint32_t(k1));
      const uint32_t u = bits_of(x[i]), v = bits_of(y[i]);
      to[i] = uint16_t((u + ((u & 0x7F800000) == 0x7F800000 ? 0 : bits & 0xFFFF)) >> 16);
      to_second[i] = uint16_t((v + ((v & 0x7F800000) == 0x7F800000 ? 0 : bits >> 16)) >> 16);
      any = std::max(any, std::max(u & 0x7FFFFFFF, v & 0x7FFFFFFF));
    }
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
