// The arithmetic of an AdamW step, in the order of torch's fused kernel: where that multiplies and adds in one
// instruction, `std::fma` does.

#pragma once

#include "moments.h"

namespace te_models {

// What a step multiplies with. lerp: 1 - beta1; far: whether it is 1/2 or more, where torch starts from the gradient.
struct Step {
  float decay, lerp, far, beta2, own_square, root_correction, epsilon, size;
};

template <bool far>
inline void advance(float* w, float g, float* first, float* second, float* root, const Step& s) {
  const float base = far ? g : *first, weight = far ? s.lerp - 1.0f : s.lerp;
  *first = std::fma(weight, g - *first, base);
  *second = std::fma(s.own_square * g, g, *second * s.beta2);
  *root = std::sqrt(*second);
  *w = *w * s.decay + (s.size * *first) / (*root / s.root_correction + s.epsilon);
}

// What the bytes of a block are, so that decoding need not ask: whether one is E4M3's NaN, or a subnormal number.
struct Kinds {
  bool nan, subnormal;
};

inline Kinds kinds_of(const uint8_t* bytes) {
  uint8_t largest = 0, least = 0xFF;  // the latter of one less: that of a zero is the largest byte
#pragma omp simd reduction(max : largest) reduction(min : least)
  for (int64_t i = 0; i < kBlock; ++i) {
    const uint8_t magnitude = bytes[i] & 0x7F, less = uint8_t(magnitude - 1);
    largest = std::max(largest, magnitude), least = std::min(least, less);
  }
  return {largest == 0x7F, least < 7};
}

}  // namespace te_models
