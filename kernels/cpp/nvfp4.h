// The scales of NVFP4.

#pragma once

#include "rounding.h"

namespace te_models {

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
