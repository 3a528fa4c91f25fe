// Moments in few bits: encoded, rounded to bfloat16, and decoded.

#include "moments.h"

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
    const Range of_first = read_block<false>(first + at, count, x);
    const Range of_second = read_block<true>(second + at, count, y);
    any = std::max(any, std::max(of_first.largest, of_second.largest));
    encode_block(x, y, of_first, of_second, uint32_t(at) + uint32_t(begin), uint32_t(k0), uint32_t(k1),
                 {first_data + at, second_data + at, first_scale + b, second_scale + b});
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
      to[i] = rounded_up(u, bits & 0xFFFF), to_second[i] = rounded_up(v, bits >> 16);
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
