"""The C++ that writes stored fields: rounds as the operations of a CPU graph do (`cpu_graph.source`), and keeps codes.

A function runs on as many threads as it is told; a caller with several bands calls from several threads, with one each.
Codes are int32 first, as wide as what they come from: a loop that writes bytes has vectors of 32 elements, and blocks
may have 16.
`error`, unless it is null, gets the bits of the largest |decoded - x|, decoded in float32. A function returns 1 where x
holds a NaN: what it wrote is then of no meaning, for the definitions say which codes a NaN has.
"""

E4M3 = r"""namespace te_models {

constexpr uint32_t kInfinity = 0x7F800000;

inline uint32_t distance(float decoded, float x) { return bits_of(decoded - x) & 0x7FFFFFFF; }

inline int32_t e4m3_byte(float v) {  // of a number that E4M3 has
  const uint32_t u = bits_of(v), magnitude = u & 0x7FFFFFFF;
  const int32_t normal = int32_t(magnitude >> 20) - 960, subnormal = int32_t(std::fabs(v) * 512.0f);
  return (magnitude < 0x3C800000 ? subnormal : normal) | int32_t(u >> 24 & 0x80);
}

inline float e4m3_magnitude(uint32_t magnitude) {  // of a byte without its sign that is no NaN
  const uint32_t small = magnitude < 8 ? 0xFFFFFFFF : 0;
  // a subnormal number as the mantissa of one in [2^-6, 2^-5), from which 2^-6 is taken away again
  return float_of((magnitude << 20) + 0x3C000000 + (small & 0x00800000)) - float_of(small & 0x3C800000);
}

inline float e4m3_value(int32_t byte) {
  const uint32_t magnitude = byte & 0x7F, none = magnitude == 0x7F ? 0x7FC00000 : 0;
  return float_of(bits_of(e4m3_magnitude(magnitude)) | none | uint32_t(byte & 0x80) << 24);
}

}  // namespace te_models
"""

FIELDS = (
    E4M3
    + r"""namespace te_models {

inline int32_t e2m1_code(float magnitude) {  // of 0 .. 6: see nvfp4/cpu.py
  const int32_t fine = int32_t(bits_of(magnitude + 0x1.fffff8p22f)) - 0x4AFFFFFC;
  const int32_t coarse = int32_t(bits_of(magnitude + 0x1.000008p24f)) - 0x4B800000;
  return std::min(fine, coarse);
}

inline float e2m1_value(int32_t code) {
  const float f = float(code);
  return code < 4 ? f * 0.5f : (code < 6 ? f - 2.0f : 2.0f * f - 8.0f);
}

// [R, C] in blocks of br x bc -> E4M3 bytes, and a scale of each block: a byte where kind is kE8m0, else float32
template <bool measured>
int quantize_blocks(const X* x, uint8_t* data, uint8_t* scale_bytes, float* scales, int64_t R, int64_t C, int64_t br,
                    int64_t bc, int kind, float epsilon, float overflow, uint32_t* error, int threads) {
  const int64_t down = (R + br - 1) / br, across = (C + bc - 1) / bc;
  uint32_t worst_of_all = 0, any_of_all = 0;
#pragma omp parallel num_threads(threads) reduction(max : worst_of_all, any_of_all)
  {
    std::vector<uint32_t> largest(across);
    std::vector<float> before(across), after(across);
    std::vector<int32_t> row_codes(C);
    int32_t* const codes = row_codes.data();
    uint32_t* const m = largest.data();
    float* const s = before.data();
    float* const t = after.data();
    uint32_t worst = 0, any = 0;
#pragma omp for
    for (int64_t stripe = 0; stripe < down; ++stripe) {
      const int64_t begin = stripe * br, end = std::min(begin + br, R);
      largest_magnitudes(x + begin * C, end - begin, C, bc, m);
      for (int64_t b = 0; b < across; ++b) {
        const Scale scale = fp8_scale<false>(float_of(m[b]), kind, epsilon, overflow);
        any = std::max(any, m[b]);
        s[b] = scale.before;
        t[b] = scale.after;
        if (kind == kE8m0)
          scale_bytes[stripe * across + b] = uint8_t(bits_of(scale.after) >> 23);
        else
          scales[stripe * across + b] = scale.after;
      }
      for (int64_t r = begin; r < end; ++r) {
        const X* const row = x + r * C;
        uint8_t* const to = data + r * C;
        if (bc == 1) {
#pragma omp simd reduction(max : worst)
          for (int64_t c = 0; c < C; ++c) {
            const float v = X::read(row[c]), rounded = rounded_fp8<false>(v * s[c]);
            codes[c] = e4m3_byte(rounded);
            if (measured) worst = std::max(worst, distance(rounded * t[c], v));
          }
        }
        for (int64_t b = 0; bc > 1 && b < across; ++b) {
          const int64_t stop = std::min((b + 1) * bc, C);
          const float scale = s[b], inverse = t[b];
#pragma omp simd reduction(max : worst)
          for (int64_t c = b * bc; c < stop; ++c) {
            const float v = X::read(row[c]), rounded = rounded_fp8<false>(v * scale);
            codes[c] = e4m3_byte(rounded);
            if (measured) worst = std::max(worst, distance(rounded * inverse, v));
          }
        }
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) to[c] = uint8_t(codes[c]);
      }
    }
    worst_of_all = worst;
    any_of_all = any;
  }
  if (measured) *error = worst_of_all;
  return any_of_all > kInfinity;
}

// one scale for all
template <bool measured>
int quantize_scaled(const X* x, uint8_t* data, int64_t size, float scale, float inverse, uint32_t* error, int threads) {
  constexpr int64_t part = 1024;
  uint32_t worst_of_all = 0, any_of_all = 0;
#pragma omp parallel for num_threads(threads) reduction(max : worst_of_all, any_of_all)
  for (int64_t begin = 0; begin < size; begin += part) {
    int32_t codes[part];
    uint32_t worst = 0, any = 0;
    const int64_t count = std::min(part, size - begin);
    const X* const from = x + begin;
    uint8_t* const to = data + begin;
#pragma omp simd reduction(max : worst, any)
    for (int64_t i = 0; i < count; ++i) {
      const float v = X::read(from[i]), rounded = rounded_fp8<false>(v * scale);
      codes[i] = e4m3_byte(rounded);
      if (measured) worst = std::max(worst, distance(rounded * inverse, v));
      any = std::max(any, X::magnitude(from[i]));
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = uint8_t(codes[i]);
    worst_of_all = std::max(worst_of_all, worst);
    any_of_all = std::max(any_of_all, any);
  }
  if (measured) *error = worst_of_all;
  return any_of_all > kInfinity;
}

// [R, C], C a multiple of 16, in blocks of br x 16 -> packed codes [R, C / 2], E4M3 scales [R, C / 16]
template <bool measured>
int quantize_nvfp4(const X* x, uint8_t* packed, uint8_t* scales, int64_t R, int64_t C, int64_t br, float amax,
                   uint32_t* error, int threads) {
  const int64_t across = C / 16;
  const float decode = 1.0f / global_encode(amax);
  uint32_t worst_of_all = 0, any_of_all = 0;
#pragma omp parallel num_threads(threads) reduction(max : worst_of_all, any_of_all)
  {
    std::vector<uint32_t> largest(across);
    std::vector<int32_t> row_codes(C);
    std::vector<uint16_t> pairs(C / 2);
    std::vector<float> before(C), after(C);  // of each element: loops over blocks of 16 would fill no vectors
    float* const factor = before.data();
    float* const scale_of = after.data();
    int32_t* const codes = row_codes.data();
    uint16_t* const pair = pairs.data();
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(pair);
    uint32_t worst = 0, any = 0;
#pragma omp for
    for (int64_t begin = 0; begin < R; begin += br) {
      const int64_t end = std::min(begin + br, R);
      std::fill(largest.begin(), largest.end(), 0u);
      for (int64_t r = begin; r < end; ++r) {
        const X* const row = x + r * C;
        for (int64_t b = 0; b < across; ++b) {
          uint32_t found = largest[b];
#pragma omp simd reduction(max : found)
          for (int64_t c = b * 16; c < b * 16 + 16; ++c) found = std::max(found, X::magnitude(row[c]));
          largest[b] = found;
        }
      }
      for (int64_t b = 0; b < across; ++b) {
        const Scale scale = nvfp4_scale(float_of(largest[b]), amax);
        any = std::max(any, largest[b]);
        std::fill(factor + b * 16, factor + b * 16 + 16, scale.before);
        std::fill(scale_of + b * 16, scale_of + b * 16 + 16, scale.after);
        for (int64_t r = begin; r < end; ++r) scales[r * across + b] = uint8_t(e4m3_byte(scale.after));
      }
      for (int64_t r = begin; r < end; ++r) {
        const X* const row = x + r * C;
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) {
          const float v = X::read(row[c]), magnitude = std::fabs(v) * factor[c];
          const int32_t code = e2m1_code(magnitude > 6.0f ? 6.0f : magnitude);
          codes[c] = code | int32_t((bits_of(v) & 0x80000000) >> 28);
        }
        if (measured) {
#pragma omp simd reduction(max : worst)
          for (int64_t c = 0; c < C; ++c) {
            const float v = X::read(row[c]), decoded = e2m1_value(codes[c] & 7) * scale_of[c] * decode;
            worst = std::max(worst, distance(float_of(bits_of(decoded) | (bits_of(v) & 0x80000000)), v));
          }
        }
        uint8_t* const to = packed + r * (C / 2);
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) bytes[c] = uint8_t(codes[c]);
#pragma omp simd
        for (int64_t i = 0; i < C / 2; ++i) to[i] = uint8_t(pair[i] | pair[i] >> 4);
      }
    }
    worst_of_all = worst;
    any_of_all = any;
  }
  if (measured) *error = worst_of_all;
  return any_of_all > kInfinity;
}

}  // namespace te_models
using namespace te_models;

extern "C" int te_quantize_blocks(const X* x, uint8_t* data, uint8_t* scale_bytes, float* scales, int64_t R, int64_t C,
                                  int64_t br, int64_t bc, int kind, float epsilon, float overflow, uint32_t* error,
                                  int threads) {
  auto run = error ? quantize_blocks<true> : quantize_blocks<false>;
  return run(x, data, scale_bytes, scales, R, C, br, bc, kind, epsilon, overflow, error, threads);
}

extern "C" int te_quantize_scaled(const X* x, uint8_t* data, int64_t size, float scale, float inverse, uint32_t* error,
                                  int threads) {
  return (error ? quantize_scaled<true> : quantize_scaled<false>)(x, data, size, scale, inverse, error, threads);
}

extern "C" int te_quantize_nvfp4(const X* x, uint8_t* packed, uint8_t* scales, int64_t R, int64_t C, int64_t br,
                                 float amax, uint32_t* error, int threads) {
  return (error ? quantize_nvfp4<true> : quantize_nvfp4<false>)(x, packed, scales, R, C, br, amax, error, threads);
}

// What te_quantize_blocks made of [R, C]: one of the two kinds of scales is null
extern "C" void te_decode_blocks(const uint8_t* data, const uint8_t* scale_bytes, const float* scales, Y* out,
                                 int64_t R, int64_t C, int64_t br, int64_t bc, int threads) {
  const int64_t across = (C + bc - 1) / bc;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> of_blocks(across);
    float* const t = of_blocks.data();
#pragma omp for
    for (int64_t r = 0; r < R; ++r) {
      const uint8_t* const row = data + r * C;
      Y* const to = out + r * C;
      const int64_t first = r / br * across;
      for (int64_t b = 0; b < across; ++b) {
        if (scales) {
          t[b] = scales[first + b];
        } else {  // 2^-127 is subnormal, and 255 no number
          const uint32_t byte = scale_bytes[first + b];
          t[b] = float_of(byte == 0 ? 0x00400000 : (byte == 255 ? 0x7FC00000 : byte << 23));
        }
      }
      if (bc == 1) {
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) to[c] = Y::write(e4m3_value(row[c]) * t[c]);
      }
      for (int64_t b = 0; bc > 1 && b < across; ++b) {
        const int64_t stop = std::min((b + 1) * bc, C);
        const float scale = t[b];
#pragma omp simd
        for (int64_t c = b * bc; c < stop; ++c) to[c] = Y::write(e4m3_value(row[c]) * scale);
      }
    }
  }
}

// What te_quantize_nvfp4 made of [R, C], times the scales of the blocks
extern "C" void te_decode_nvfp4(const uint8_t* packed, const uint8_t* scales, Y* out, int64_t R, int64_t C,
                                int threads) {
  const int64_t across = C / 16;
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint16_t> pairs(C / 2);
    std::vector<float> of_elements(C);
    uint16_t* const pair = pairs.data();
    const uint8_t* const codes = reinterpret_cast<const uint8_t*>(pair);
    float* const scale_of = of_elements.data();
#pragma omp for
    for (int64_t r = 0; r < R; ++r) {
      const uint8_t* const from = packed + r * (C / 2);
      Y* const to = out + r * C;
#pragma omp simd
      for (int64_t i = 0; i < C / 2; ++i) pair[i] = uint16_t((from[i] & 15) | (from[i] >> 4) << 8);
      for (int64_t b = 0; b < across; ++b)
        std::fill(scale_of + b * 16, scale_of + b * 16 + 16, e4m3_value(scales[r * across + b]));
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) {
        const int32_t code = codes[c];
        const float value = e2m1_value(code & 7) * scale_of[c];
        to[c] = Y::write(float_of(bits_of(value) ^ uint32_t(code & 8) << 28));
      }
    }
  }
}

// E4M3 [R, C] times float32 scales [R, ceil(C / width)]
extern "C" void te_decode_e4m3(const uint8_t* data, const float* scales, Y* out, int64_t R, int64_t C, int64_t width) {
  const int64_t across = (C + width - 1) / width;
  for (int64_t r = 0; r < R; ++r) {
    const uint8_t* const row = data + r * C;
    Y* const to = out + r * C;
    for (int64_t b = 0; b < across; ++b) {
      const int64_t stop = std::min((b + 1) * width, C);
      const float scale = scales[r * across + b];
#pragma omp simd
      for (int64_t c = b * width; c < stop; ++c) to[c] = Y::write(e4m3_value(row[c]) * scale);
    }
  }
}
"""
)
