// A whole AdamW step: weight and moments are read, updated and rounded a block at a time, in registers.
//
// The formula and its order of operations are those of torch's fused kernel, which `layers/optimizers/adamw_update.py`
// calls on working copies; where that multiplies and adds in one instruction, `std::fma` does. What a step leaves is
// what decoding, that kernel and encoding leave (`library.adamw_step` compares the bits before it is used).

#include "adamw_lanes.h"

namespace te_models {

// A block of `count` elements of which `read` gives the moments: new weights, moments, and the root of the second one.
// And the ranges of the first moment and of the root.
template <bool far, class Read>
inline void advance_block(const Y* weight, const X* gradient, int64_t count, const Step& s, const Read& read, float* w,
                          float* first, float* second, float* root, Range* of_first, Range* of_root) {
  uint32_t largest = 0, largest_root = 0, least = kInfinity, least_root = kInfinity;
#pragma omp simd reduction(max : largest, largest_root) reduction(min : least, least_root)
  for (int64_t i = 0; i < count; ++i) {
    float a, b, c, value = Y::read(weight[i]);
    read(i, &a, &b);
    advance<far>(&value, X::read(gradient[i]), &a, &b, &c, s);
    w[i] = value, first[i] = a, second[i] = b, root[i] = c;
    const uint32_t m = bits_of(a) & 0x7FFFFFFF, n = bits_of(c) & 0x7FFFFFFF;
    largest = std::max(largest, m), largest_root = std::max(largest_root, n);
    least = std::min(least, m), least_root = std::min(least_root, n);
  }
  for (int64_t i = count; i < kBlock; ++i) first[i] = root[i] = 0.0f;
  const bool filled = count < kBlock;
  *of_first = {filled ? 0 : least, largest}, *of_root = {filled ? 0 : least_root, largest_root};
}

template <bool far>
int step_float8(Y* weight, const X* gradient, const Stored& stored, int64_t n, const Step& s, uint32_t k0, uint32_t k1,
                uint8_t* left, int threads) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  int any = 0;
#pragma omp parallel for num_threads(threads) reduction(max : any)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * kBlock, count = std::min(kBlock, n - at);
    const Stored to{stored.first + at, stored.second + at, stored.first_scale + b, stored.second_scale + b};
    const float one = *to.first_scale, other = *to.second_scale;
    float w[kBlock], x[kBlock], v[kBlock], y[kBlock];
    Range of_first, of_root;
    const Kinds kinds = kinds_of(to.first), kinds_second = kinds_of(to.second);
    left[b] = kinds.nan || kinds_second.nan;  // whose code is another matter, as below
    if (left[b]) {
      any = 1;
      continue;
    }
    const bool subnormal = kinds.subnormal || kinds_second.subnormal;
    if (count == kBlock && !subnormal && step_in_lanes<far>(weight + at, gradient + at, to, uint32_t(at), s, k0, k1))
      continue;
    const auto read = [=](int64_t i, float* first, float* second) {
      const float root = e4m3_magnitude(to.second[i] & 0x7F) * other;
      const uint32_t byte = to.first[i], sign = (byte & 0x80) << 24;
      *first = float_of(bits_of(e4m3_magnitude(byte & 0x7F)) | sign) * one, *second = root * root;
    };
    // a byte's bits as a float32's are 2^-120 of its value, unless it is subnormal
    const float large = one * 0x1p120f, large_second = other * 0x1p120f;
    const auto read_normal = [=](int64_t i, float* first, float* second) {
      const float root = float_of(uint32_t(to.second[i] & 0x7F) << 20) * large_second;
      *first = float_of((uint32_t(int32_t(int8_t(to.first[i]))) << 20) & 0x87F00000) * large, *second = root * root;
    };
    if (subnormal || !(one < 128.0f && other < 128.0f))
      advance_block<far>(weight + at, gradient + at, count, s, read, w, x, v, y, &of_first, &of_root);
    else advance_block<far>(weight + at, gradient + at, count, s, read_normal, w, x, v, y, &of_first, &of_root);
    left[b] = of_first.nan() || of_root.nan();
    if (left[b]) {
      any = 1;
      continue;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) weight[at + i] = Y::write(w[i]);
    encode_block(x, y, of_first, of_root, uint32_t(at), k0, k1, to);
  }
  return any;
}

template <bool far>
int step_bfloat16(Y* weight, const X* gradient, uint16_t* first, uint16_t* second, int64_t n, const Step& s,
                  uint32_t k0, uint32_t k1, uint8_t* left, int threads) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  int any = 0;
#pragma omp parallel for num_threads(threads) reduction(max : any)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * kBlock, count = std::min(kBlock, n - at);
    uint16_t *const to = first + at, *const to_second = second + at;
    float w[kBlock], x[kBlock], v[kBlock], y[kBlock];
    Range of_first, of_root;
    const auto read = [=](int64_t i, float* a, float* c) {
      *a = float_of(uint32_t(to[i]) << 16), *c = float_of(uint32_t(to_second[i]) << 16);
    };
    advance_block<far>(weight + at, gradient + at, count, s, read, w, x, v, y, &of_first, &of_root);
    left[b] = of_first.nan() || of_root.nan();
    if (left[b]) {
      any = 1;
      continue;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = mixed(mixed((uint32_t(at) + uint32_t(i)) ^ k0) + k1);
      weight[at + i] = Y::write(w[i]);
      to[i] = rounded_up(bits_of(x[i]), bits & 0xFFFF), to_second[i] = rounded_up(bits_of(v[i]), bits >> 16);
    }
  }
  return any;
}

template <bool far>
void step_float32(Y* weight, const X* gradient, float* first, float* second, int64_t n, const Step& s, int threads) {
#pragma omp parallel for simd num_threads(threads)
  for (int64_t i = 0; i < n; ++i) {
    float w = Y::read(weight[i]), a = first[i], b = second[i], root;
    advance<far>(&w, X::read(gradient[i]), &a, &b, &root, s);
    weight[i] = Y::write(w), first[i] = a, second[i] = b;
  }
}

inline Step step_of(const float* scalars) {
  return {scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], scalars[5], scalars[6], scalars[7]};
}

}  // namespace te_models
using namespace te_models;

// One step of n weights; returns 1 where blocks were left as they are, for a NaN in their moments: those `left` says.
extern "C" int te_adamw_float8(Y* weight, const X* gradient, uint8_t* first, float* first_scale, uint8_t* second,
                               float* second_scale, int64_t n, const float* scalars, int32_t k0, int32_t k1,
                               uint8_t* left, int threads) {
  const Step s = step_of(scalars);
  const auto step = s.far != 0.0f ? step_float8<true> : step_float8<false>;
  return step(weight, gradient, {first, second, first_scale, second_scale}, n, s, k0, k1, left, threads);
}

extern "C" int te_adamw_bfloat16(Y* weight, const X* gradient, uint16_t* first, uint16_t* second, int64_t n,
                                 const float* scalars, int32_t k0, int32_t k1, uint8_t* left, int threads) {
  const Step s = step_of(scalars);
  const auto step = s.far != 0.0f ? step_bfloat16<true> : step_bfloat16<false>;
  return step(weight, gradient, first, second, n, s, k0, k1, left, threads);
}

extern "C" int te_adamw_float32(Y* weight, const X* gradient, float* first, float* second, int64_t n,
                                const float* scalars, int threads) {
  const Step s = step_of(scalars);
  const auto step = s.far != 0.0f ? step_float32<true> : step_float32<false>;
  step(weight, gradient, first, second, n, s, threads);
  return 0;
}
