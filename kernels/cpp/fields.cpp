// What writes stored fields: rounds as the operations of a CPU graph do (`stripes.h`), and keeps codes.
//
// A function runs on as many threads as it is told; a caller with several bands calls from several threads, with one
// each. `error`, unless it is null, gets the bits of the largest |decoded - x|, decoded in float32. A function returns
// 1 where x holds a NaN: what it wrote is then of no meaning, for the definitions say which codes a NaN has.

#include "fp8.h"
#include "nvfp4.h"
#include "e4m3.h"

namespace te_models {

// Decode a row of E4M3 whose blocks of bc columns have these scales.
inline void decode_row(const uint8_t* from, const float* scales, Y* to, int64_t C, int64_t bc) {
  const int64_t across = (C + bc - 1) / bc;
  uint32_t largest = 0;
  for (int64_t b = 0; b < across; ++b) largest = std::max(largest, bits_of(scales[b]));
  const bool numbers = largest < kInfinity && !has_nan(from, C);  // and so are their products
  int64_t c = 0;
  if (bc == 1) {
    for (; numbers && c + kLanes <= C; c += kLanes)
      write<false>(to + c, read_e4m3(from + c) * load<Floats>(scales + c));
#pragma omp simd
    for (int64_t i = c; i < C; ++i) to[i] = Y::write(e4m3_value(from[i]) * scales[i]);
    return;
  }
  for (int64_t b = 0; b < across; ++b) {
    const int64_t stop = std::min(c + bc, C);
    const float scale = scales[b];
    // a multiple of 2^-9 times a power of two is a number of bfloat16, of which the least is 2^-133
    const bool exact = (bits_of(scale) & 0x007FFFFF) == 0 && scale >= 0x1p-124f;
    if (numbers && exact)
      for (; c + kLanes <= stop; c += kLanes) write<true>(to + c, read_e4m3(from + c) * all(scale));
    else if (numbers)
      for (; c + kLanes <= stop; c += kLanes) write<false>(to + c, read_e4m3(from + c) * all(scale));
#pragma omp simd
    for (int64_t i = c; i < stop; ++i) to[i] = Y::write(e4m3_value(from[i]) * scale);
    c = stop;
  }
}

// Round a vector of finite numbers and write their codes; worst: the bits of the largest |decoded - x|.
template <bool measured>
INLINE inline void write_e4m3(const X* from, uint8_t* to, Floats scale, Floats inverse, Words* worst) {
  const Words u = read_bits(from), magnitude = u & 0x7FFFFFFF;
  const Rounded<te_models::E4M3> rounded(float_of(magnitude) * scale);
  write_bytes(to, rounded.code | (u >> 24 & 0x80));
  if (measured) *worst = larger(*worst, bits_of(rounded.value * inverse - float_of(magnitude)) & 0x7FFFFFFF);
}

template <bool measured>
INLINE inline void write_e4m3(X from, uint8_t* to, float scale, float inverse, uint32_t* worst) {
  const float v = X::read(from), rounded = rounded_fp8<false>(v * scale);
  *to = uint8_t(e4m3_byte(rounded));
  if (measured) *worst = std::max(*worst, distance(rounded * inverse, v));
}

// [R, C] in blocks of br x bc -> E4M3 bytes, and a scale of each block: a byte where kind is kE8m0, else float32
template <bool measured>
int quantize_blocks(const X* x, uint8_t* data, uint8_t* scale_bytes, float* scales, int64_t R, int64_t C, int64_t br,
                    int64_t bc, int kind, float epsilon, float overflow, uint32_t* error, int threads) {
  const int64_t down = (R + br - 1) / br, across = (C + bc - 1) / bc;
  uint32_t worst_of_all = 0, any_of_all = 0;
#pragma omp parallel num_threads(threads) reduction(max : worst_of_all, any_of_all)
  {
    std::vector<uint32_t> largest(across), columns(C);
    std::vector<float> before(across), after(across);
    uint32_t* const m = largest.data();
    float* const s = before.data();
    float* const t = after.data();
    uint32_t worst = 0, any = 0;
    Words worst_in_lanes{};
#pragma omp for
    for (int64_t stripe = 0; stripe < down; ++stripe) {
      const int64_t begin = stripe * br, end = std::min(begin + br, R);
      largest_magnitudes(x + begin * C, end - begin, C, bc, columns.data(), m);
      fp8_scales<false>(m, across, kind, epsilon, overflow, s, t);
      for (int64_t b = 0; b < across; ++b) any = std::max(any, m[b]);
      if (kind == kE8m0)
        for (int64_t b = 0; b < across; ++b) scale_bytes[stripe * across + b] = uint8_t(bits_of(t[b]) >> 23);
      else std::copy(t, t + across, scales + stripe * across);
      for (int64_t r = begin; r < end; ++r) {
        const X* const row = x + r * C;
        uint8_t* const to = data + r * C;
        int64_t c = 0;
        if (bc == 1) {
          for (; c + kLanes <= C; c += kLanes)
            write_e4m3<measured>(row + c, to + c, load<Floats>(s + c), load<Floats>(t + c), &worst_in_lanes);
          for (; c < C; ++c) write_e4m3<measured>(row[c], to + c, s[c], t[c], &worst);
          continue;
        }
        for (int64_t b = 0; b < across; ++b) {
          const int64_t stop = std::min(c + bc, C);
          const Floats scale = all(s[b]), inverse = all(t[b]);
          for (; c + kLanes <= stop; c += kLanes)
            write_e4m3<measured>(row + c, to + c, scale, inverse, &worst_in_lanes);
          for (; c < stop; ++c) write_e4m3<measured>(row[c], to + c, s[b], t[b], &worst);
        }
      }
    }
    worst_of_all = std::max(worst, largest_of(worst_in_lanes));
    any_of_all = any;
  }
  if (measured) *error = worst_of_all;
  return any_of_all > kInfinity;
}

// one scale for all
template <bool measured>
int quantize_scaled(const X* x, uint8_t* data, int64_t size, float scale, float inverse, uint32_t* error, int threads) {
  constexpr int64_t part = 4096;
  const bool positive = scale > 0.0f && finite(scale);
  uint32_t worst_of_all = 0, any_of_all = 0;
#pragma omp parallel for num_threads(threads) reduction(max : worst_of_all, any_of_all)
  for (int64_t begin = 0; begin < size; begin += part) {
    const int64_t stop = std::min(begin + part, size);
    Words worst_in_lanes{}, in_lanes{};
    int64_t c = begin;
    for (; positive && c + kLanes <= stop; c += kLanes) {
      in_lanes = larger(in_lanes, read_magnitudes<1>(x + c));
      write_e4m3<measured>(x + c, data + c, all(scale), all(inverse), &worst_in_lanes);
    }
    uint32_t any = largest_of(in_lanes), worst = largest_of(worst_in_lanes);
    for (; c < stop; ++c) {
      any = std::max(any, X::magnitude(x[c]));
      write_e4m3<measured>(x[c], data + c, scale, inverse, &worst);
    }
    worst_of_all = std::max(worst_of_all, worst);
    any_of_all = std::max(any_of_all, any);
  }
  if (measured) *error = worst_of_all;
  return any_of_all > kInfinity;
}

// Round a vector of finite numbers and write their codes, two to a byte. decode: what decoding multiplies with, after
// the block's scale.
template <bool measured>
INLINE inline void write_e2m1(const X* from, uint8_t* to, Floats factor, Floats scale, Floats decode, Words* worst) {
  const Words u = read_bits(from), magnitude = u & 0x7FFFFFFF;
  const Rounded<E2M1> rounded(float_of(magnitude) * factor);
  write_pairs(to, rounded.code | (u >> 28 & 8));
  if (measured) *worst = larger(*worst, bits_of(rounded.value * scale * decode - float_of(magnitude)) & 0x7FFFFFFF);
}

// [R, C], C a multiple of 16, in blocks of br x 16 -> packed codes [R, C / 2], E4M3 scales [R, C / 16]
template <bool measured>
int quantize_nvfp4(const X* x, uint8_t* packed, uint8_t* scales, int64_t R, int64_t C, int64_t br, float amax,
                   uint32_t* error, int threads) {
  const int64_t across = C / 16;
  const float encode = global_encode(amax), decode = 1.0f / encode;
  uint32_t worst_of_all = 0, any_of_all = 0;
#pragma omp parallel num_threads(threads) reduction(max : worst_of_all, any_of_all)
  {
    std::vector<uint32_t> largest(across), columns(C);
    std::vector<int32_t> bytes_of_scales(across);
    std::vector<float> before(across), after(across);
    uint32_t* const m = largest.data();
    int32_t* const bytes = bytes_of_scales.data();
    float* const s = before.data();
    float* const t = after.data();
    uint32_t any = 0;
    Words worst{};
#pragma omp for
    for (int64_t begin = 0; begin < R; begin += br) {
      const int64_t end = std::min(begin + br, R);
      largest_magnitudes(x + begin * C, end - begin, C, 16, columns.data(), m);
      nvfp4_scales(m, across, encode, s, t);
#pragma omp simd
      for (int64_t b = 0; b < across; ++b) bytes[b] = e4m3_byte(t[b]);
      for (int64_t b = 0; b < across; ++b) any = std::max(any, m[b]);
      for (int64_t r = begin; r < end; ++r) {
        const X* const row = x + r * C;
        uint8_t* const to = packed + r * (C / 2);
        for (int64_t b = 0; b < across; ++b) scales[r * across + b] = uint8_t(bytes[b]);
        for (int64_t b = 0; b < across; ++b) {
          const Floats factor = all(s[b]), scale = all(t[b]);
          for (int64_t c = b * 16; c < b * 16 + 16; c += kLanes)
            write_e2m1<measured>(row + c, to + c / 2, factor, scale, all(decode), &worst);
        }
      }
    }
    worst_of_all = largest_of(worst);
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
      const int64_t first = r / br * across;
      for (int64_t b = 0; b < across; ++b) {
        if (scales) {
          t[b] = scales[first + b];
        } else {  // 2^-127 is subnormal, and 255 no number
          const uint32_t byte = scale_bytes[first + b];
          t[b] = float_of(byte == 0 ? 0x00400000 : (byte == 255 ? 0x7FC00000 : byte << 23));
        }
      }
      decode_row(data + r * C, t, out + r * C, C, bc);
    }
  }
}

// What te_quantize_nvfp4 made of [R, C], times the scales of the blocks
extern "C" void te_decode_nvfp4(const uint8_t* packed, const uint8_t* scales, Y* out, int64_t R, int64_t C,
                                int threads) {
  const int64_t across = C / 16;
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < R; ++r) {
    const uint8_t *const from = packed + r * (C / 2), *const of_blocks = scales + r * across;
    Y* const to = out + r * C;
    for (int64_t b = 0; b < across; ++b) {
      const Floats scale = all(e4m3_value(of_blocks[b]));
      // a multiple of 1/2 below 8 times one of 2^-9 with four bits is a number of bfloat16
      for (int64_t c = b * 16; c < b * 16 + 16; c += kLanes) write<true>(to + c, read_e2m1(from + c / 2) * scale);
    }
  }
}

// E4M3 [R, C] times float32 scales [R, ceil(C / width)]
extern "C" void te_decode_e4m3(const uint8_t* data, const float* scales, Y* out, int64_t R, int64_t C, int64_t width) {
  const int64_t across = (C + width - 1) / width;
  for (int64_t r = 0; r < R; ++r) decode_row(data + r * C, scales + r * across, out + r * C, C, width);
}

// Whether one of `size` bytes of E4M3 is NaN.
extern "C" int te_has_nan(const uint8_t* data, int64_t size) { return has_nan(data, size); }
