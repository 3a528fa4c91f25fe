// How the formats of weights, E4M3, E5M2 and E2M1, are decoded in registers, and decoded rows multiplied.

#pragma once

#include <pmmintrin.h>

#include "bytes.h"

namespace te_models {

constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Formats of a byte decode to 1/kFactor of their values.
struct E4M3 {
  static constexpr bool packed = false;
#if defined(WIDE)
  static constexpr float kFactor = 256.0f;  // E4M3 in float16's places: the exponent's bias is 7 and not 15
  // the mask clears the sign's copy in the uppermost bit of the exponent
  static Floats decode(const uint8_t* p) { return halves(masked(up(bytes(p), 7), short(0xBFFF))); }
  static void decode(const uint8_t* p, Floats* to) { both_halves(masked(up(twice_bytes(p), 7), short(0xBFFF)), to); }
#else
  static constexpr float kFactor = 0x1p120f;  // in float32's places: the exponent's bias is 7 and not 127
  static constexpr int kMantissa = 3;
#endif
  static constexpr uint8_t kSpecial = 0x7F;  // the bits of NaN
  static float special(uint8_t) { return kNone; }
};
struct E5M2 {
  static constexpr bool packed = false;
#if defined(WIDE)
  static constexpr float kFactor = 1.0f;
  static Floats decode(const uint8_t* p) { return halves(up(bytes(p), 8)); }
  static void decode(const uint8_t* p, Floats* to) { both_halves(up(twice_bytes(p), 8), to); }
#else
  static constexpr float kFactor = 0x1p112f;
  static constexpr int kMantissa = 2;
#endif
  static constexpr uint8_t kSpecial = 0x7C;  // of infinity and NaN
  static float special(uint8_t byte) { return (byte & 0x7F) == 0x7C ? (byte & 0x80 ? -kInfinity : kInfinity) : kNone; }
};
struct E2M1 {
  static constexpr bool packed = true;  // two values of a byte
};

struct INT4 {
  static constexpr int bits = 4;
};
struct INT8 {
  static constexpr int bits = 8;
};

using W = FORMAT;

enum Kind { kPerTensor, kFloat32, kPow2, kE8m0, kNvfp4 };

struct Weight {
  const uint8_t* data;
  int64_t stride;  // bytes from row to row
  const void* scale;
  int64_t down, across;  // elements from scale to scale
  int64_t block_rows, block_columns, K;
  int kind;
};

// Rows::decode<rows> calls use(k, r, w) for the vectors w of that many rows from row n on, k the first column of each;
// the last row of the matrix stands in for those past it. Columns past K are zero. After restart() all are used again.
#ifdef OF_BYTES
// kExact: value * scale is a bfloat16, or none is asked for; kRounded: it is rounded to one, kRoundedTwice: to float32
// before; kCareful: of any magnitude.
enum Mode { kExact, kRounded, kRoundedTwice, kCareful };

// of a byte that was decoded to w
inline float careful_weight(uint8_t byte, float w, float scale) {
  const float value = ((byte & W::kSpecial) == W::kSpecial ? W::special(byte) : w * W::kFactor) * scale;
  return X::rounds ? BFloat16::read(BFloat16::write(value)) : value;
}

template <Mode mode>
INLINE inline Floats weight_of(Floats w, Floats s) {
  if constexpr (mode == kRounded && X::rounds) {
    const Floats m = mul(w, mul(s, all(0x1p16f)));
    return sub(m, fnma(w, s, m));
  }
  const Floats v = mul(w, s);
  if constexpr (mode == kExact || !X::rounds) return v;
  const Floats m = mul(v, all(0x1p16f));  // what is left of m - (m - v) are the eight bits of a bfloat16
  return sub(m, sub(m, v));
}

// Whether rounding the values' products with a scale to float32 before changes nothing: there are eight significands.
inline bool rounds_once(float scale) {
  alignas(64) float values[16];
  for (int i = 0; i < 16; ++i) values[i] = float(8 + i % 8);
  const Floats w = load(values), s = all(scale);
  const Integers differs = weight_of<kRounded>(w, s) != weight_of<kRoundedTwice>(w, s);
  return largest_of(Words(differs)) == 0;
}

// The exponent, as its bits, from which a scale is too large: its product with kFactor is finite below.
constexpr uint32_t kMost = W::kFactor > 256.0f ? 127 + 7 : 127 + 100;

#if defined(WIDE)
inline bool any_special(const uint8_t* p, int64_t size) {
  Register largest = no_bytes();  // magnitudes: NaN, and infinity, have the largest
  int64_t i = 0;
  for (; i + kBytes <= size; i += kBytes) largest = larger_magnitudes(largest, p + i);
  uint8_t last[kBytes] = {};
  std::memcpy(last, p + i, size - i);
  return any_at_least(larger_magnitudes(largest, last), W::kSpecial);
}

// 16 weights of any magnitude. Not inline: few are, and all modes of a loop would have it.
__attribute__((noinline)) inline void careful_weights(const uint8_t* p, float scale, float* to) {
  store(to, W::decode(p));
  for (int i = 0; i < kLanes; ++i) to[i] = careful_weight(p[i], to[i], scale);
}
#else
// 32 weights of any magnitude, the first half with one scale, the other with another, in the order of `decode_fours`.
// Not inline: few are, and all modes of a loop would have it.
__attribute__((noinline)) inline void careful_weights(const uint8_t* p, float low, float high, float* to) {
  for (int i = 0; i < 32; ++i) {
    const uint32_t byte = p[i];
    const float w = float_of((byte & 0x80) << 24 | (byte & 0x7F) << (23 - W::kMantissa));
    to[i % 4 * kLanes + i / 4] = careful_weight(p[i], w, i < 16 ? low : high);
  }
}
#endif

// Read the scales of a row and say how to decode it.
inline Mode read_scales(const Weight& w, int64_t row, int64_t blocks, float* to) {
  const int64_t begin = row / w.block_rows * w.down, across = w.across;
  float least = std::numeric_limits<float>::infinity(), most = 0;
  if (w.kind == kE8m0) {
    const uint8_t* const p = static_cast<const uint8_t*>(w.scale) + begin;
    bool ordinary = true;
    int64_t b = 0;
    if (across == 1) {  // in vectors where they lie side by side
      Words outside = all(uint32_t(0));
      for (; b + kLanes <= blocks; b += kLanes) {
        const Words byte = widened_bytes(p + b);
        outside |= Words(byte - 28 >= kMost - 28);
        store(to + b, float_of(byte << 23));
      }
      ordinary = !any(outside);
    }
    for (; b < blocks; ++b) {
      const uint32_t byte = p[b * across];
      ordinary &= byte > 27 && byte < kMost;
      to[b] = float_of(byte << 23);
    }
    if (ordinary) return kExact;
    for (b = 0; b < blocks; ++b) {
      const uint32_t byte = p[b * across];
      to[b] = byte == 255 ? kNone : byte == 0 ? 0x1p-127f : float_of(byte << 23);
    }
    return kCareful;
  }
  const float* const p = static_cast<const float*>(w.scale) + begin;
  for (int64_t b = 0; b < blocks; ++b) {
    to[b] = p[b * across];
    least = std::min(least, std::fabs(to[b]));
    most = std::max(most, std::fabs(to[b]));
  }
  if (!(least > 0x1p-100f && most < float_of(kMost << 23))) return kCareful;
  if (w.kind == kPow2 || !X::rounds) return kExact;
  bool once = most * 0x1p16f < float_of(kMost << 23);
  for (int64_t b = 0; b < blocks && once; ++b) once = rounds_once(to[b]);
  return once ? kRounded : kRoundedTwice;
}

// Bytes in float32's places may be subnormal: a thread that takes those for zero (`torch.set_flush_denormal`) reads
// them while this stands.
struct ReadsSubnormal {
  const unsigned before = _mm_getcsr();
  ReadsSubnormal() { _mm_setcsr(before & ~_MM_DENORMALS_ZERO_MASK); }
  ~ReadsSubnormal() { _mm_setcsr(before); }
};

struct Rows {
  std::vector<float> scale;
  ReadsSubnormal subnormal;

#if defined(WIDE)
  template <Mode mode, bool, int rows, class Use>
  INLINE bool run(const Weight& w, const uint8_t* const* row, const float* const* of_row, const Use& use) {
    const int64_t K = w.K, full = K / kLanes * kLanes, L = w.block_columns;
    const auto use_16 = [&](int64_t k, auto r, const uint8_t* p, Floats v, Floats s, float f) INLINE {
      if constexpr (mode == kCareful) {
        float found[kLanes];
        careful_weights(p, f, found);
        use(k, r, load(found));
      } else {
        use(k, r, weight_of<mode>(v, s));
      }
    };
    for (int64_t begin = 0, b = 0; begin < full; begin += L, ++b) {
      Floats s[rows];
      each_row<rows>([&](auto r) INLINE { s[r] = all(of_row[r][b] * W::kFactor); });
      const int64_t end = std::min(begin + L, full);
      const auto use_one = [&](int64_t k, auto r, Floats v) INLINE { use_16(k, r, row[r] + k, v, s[r], of_row[r][b]); };
      int64_t k = begin;
      for (; k + 2 * kLanes <= end; k += 2 * kLanes)
        each_row<rows>([&](auto r) INLINE {
          soon(row[r] + k + rows * w.stride);
          Floats two[2];
          W::decode(row[r] + k, two);
          use_one(k, r, two[0]);
          use_one(k + kLanes, r, two[1]);
        });
      for (; k < end; k += kLanes) each_row<rows>([&](auto r) INLINE { use_one(k, r, W::decode(row[r] + k)); });
    }
    if (full == K) return false;
    each_row<rows>([&](auto r) INLINE {
      uint8_t last[16] = {};
      std::memcpy(last, row[r] + full, K - full);
      const float f = of_row[r][full / L];
      use_16(full, r, last, W::decode(last), all(f * W::kFactor), f);
    });
    return false;
  }
#else
  // same: the rows have the same scales. Returns whether a NaN or infinity was among the weights, which only kCareful
  // decodes.
  template <Mode mode, bool same, int rows, class Use>
  INLINE bool run(const Weight& w, const uint8_t* const* row, const float* const* of_row, const Use& use) {
    const int64_t K = w.K, full = K / 32 * 32, L = w.block_columns;
    Register largest = no_bytes();  // magnitudes: NaN, and infinity, have the largest
    const auto use_32 = [&](int64_t k, auto r, const uint8_t* p, float low, float high, Floats s) INLINE {
      if constexpr (mode == kCareful) {
        float found[32];
        careful_weights(p, low, high, found);
        for (int i = 0; i < 4; ++i) use(k + i * kLanes, r, load(found + i * kLanes));
      } else {
        Floats found[4];
        decode_fours<W::kMantissa>(p, found);
        largest = larger_magnitudes(largest, p);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) use(k + i * kLanes, r, weight_of<mode>(found[i], s));
      }
    };
    const auto use_two_blocks = [&](int64_t k, auto r, const uint8_t* p) INLINE {
      const float low = of_row[r][k / L], high = of_row[r][std::min(k + 16, K - 1) / L];
      use_32(k, r, p, low, high, low_and_high(low * W::kFactor, high * W::kFactor));
    };
    if (L % 32 != 0 && L < K) {
      for (int64_t k = 0; k < full; k += 32) each_row<rows>([&](auto r) INLINE { use_two_blocks(k, r, row[r] + k); });
    } else {
      for (int64_t begin = 0, b = 0; begin < full; begin += L, ++b) {
        constexpr int scales = same ? 1 : rows;
        Floats s[scales];
        each_row<scales>([&](auto r) INLINE { s[r] = all(of_row[r][b] * W::kFactor); });
        for (int64_t k = begin; k < std::min(begin + L, full); k += 32)
          each_row<rows>([&](auto r) INLINE {
            soon(row[r] + k + rows * w.stride);
            use_32(k, r, row[r] + k, of_row[r][b], of_row[r][b], s[same ? 0 : int(r)]);
          });
      }
    }
    if (full < K)
      each_row<rows>([&](auto r) INLINE {
        uint8_t last[32] = {};
        std::memcpy(last, row[r] + full, K - full);
        use_two_blocks(full, r, last);
      });
    return any_at_least(largest, W::kSpecial);
  }
#endif

  template <int rows, class Restart, class Use>
  INLINE void decode(const Weight& w, int64_t n, int64_t N, const Restart& restart, const Use& use) {
    const int64_t blocks = (w.K + w.block_columns - 1) / w.block_columns, end = std::min(n + rows, N) - 1;
    scale.resize(rows * blocks);
    const uint8_t* row[rows];
    const float* of_row[rows];
    // Rows that are decoded to be multiplied several times, two of them, take little of the time.
    const bool same = rows > 2 && n / w.block_rows == end / w.block_rows;
    Mode mode = kExact;
    for (int r = 0; r < rows; ++r) {
      const int64_t at = std::min(n + r, end);
      row[r] = w.data + at * w.stride;
      of_row[r] = scale.data() + (same ? 0 : r * blocks);
      if (r == 0 || !same) mode = std::max(mode, read_scales(w, at, blocks, scale.data() + r * blocks));
#if defined(WIDE)
      if (any_special(row[r], w.K)) mode = kCareful;
#endif
    }
    if (mode == kRounded && !same) mode = kRoundedTwice;
    if constexpr (rows > 2) {
      if (mode == kExact && same && !run<kExact, true, rows>(w, row, of_row, use)) return;
      if constexpr (X::rounds) {
        if (mode == kRounded && !run<kRounded, true, rows>(w, row, of_row, use)) return;
        if (mode == kRoundedTwice && same && !run<kRoundedTwice, true, rows>(w, row, of_row, use)) return;
      }
    }
    if (mode == kExact && !same && !run<kExact, false, rows>(w, row, of_row, use)) return;
    if constexpr (X::rounds)
      if (mode == kRoundedTwice && !same && !run<kRoundedTwice, false, rows>(w, row, of_row, use)) return;
    if (mode != kCareful) restart();
    run<kCareful, false, rows>(w, row, of_row, use);
  }
};

struct Tables {
  Tables(const Weight&, const float*) {}
};
inline Rows rows_of(const Tables&) { return {}; }
#elif !defined(OF_INTEGERS)
// What decoding NVFP4 multiplies with.
inline float global_decode(float amax) {
  const float encode = 2688.0f / amax;
  if (amax == 0.0f || !(std::fabs(amax) <= std::numeric_limits<float>::max())) return 1.0f;
  return 1.0f / std::min(encode, std::numeric_limits<float>::max());
}

// value * scale of all codes, for each scale.
inline std::vector<float> scaled_values() {
  std::vector<float> found;
  const float values[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  for (int byte = 0; byte < 256; ++byte) {
    const int e = byte >> 3 & 15, m = byte & 7;
    float scale = e ? std::ldexp(float(8 + m), e - 10) : std::ldexp(float(m), -9);
    scale = (byte & 127) == 127 ? kNone : byte & 128 ? -scale : scale;
    for (int code = 0; code < 16; ++code) found.push_back((code & 8 ? -values[code & 7] : values[code & 7]) * scale);
  }
  return found;
}

// The 16 values of a block of each scale.
struct Tables {
  std::vector<float> memory;
  const float* table;
  Tables(const Weight&, const float* amax) : memory(256 * 16 + 16) {
    static const std::vector<float> all_scaled = scaled_values();  // of every tensor: only its factor is missing
    const float factor = global_decode(*amax);
    float* const to = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / 4;
    for (int i = 0; i < 256 * 16; ++i) to[i] = X::read(X::write(all_scaled[i] * factor));
    table = to;
  }
};

struct Rows {
  const float* table;

  template <int rows, class Restart, class Use>
  INLINE void decode(const Weight& w, int64_t n, int64_t N, const Restart&, const Use& use) {
    const int64_t K = w.K, blocks = (K + 15) / 16;
    const uint8_t *row[rows], *scale[rows];
    for (int r = 0; r < rows; ++r) {
      const int64_t at = std::min(n + r, N - 1);
      row[r] = w.data + at * w.stride;
      scale[r] = static_cast<const uint8_t*>(w.scale) + at * w.down;
    }
    constexpr int vectors = 16 / kLanes;
    const auto use_block = [&](int64_t b, auto r, const uint8_t* codes) INLINE {
      soon(row[r] + b * 8 + rows * w.stride);
      Floats some[vectors];
      e2m1(codes, table + scale[r][b * w.across] * 16, some);
      use(b * 16, r, some[0]);
      if constexpr (vectors == 2) use(b * 16 + kLanes, r, some[1]);
    };
    for (int64_t b = 0; b < K / 16; ++b) each_row<rows>([&](auto r) INLINE { use_block(b, r, row[r] + b * 8); });
    if (K % 16 == 0) return;
    each_row<rows>([&](auto r) INLINE {
      uint8_t last[8] = {};
      std::memcpy(last, row[r] + K / 16 * 8, K % 16 / 2);
      use_block(blocks - 1, r, last);
    });
  }
};
inline Rows rows_of(const Tables& tables) { return {tables.table}; }
#endif

// `count` rows of x by decoded rows of the weight -> out [count, kRows].
template <int count>
void several(const float* decoded, const float* x, int64_t padded, float* out) {
  Floats acc[count][kRows];
  for (int m = 0; m < count; ++m)
    for (int r = 0; r < kRows; ++r) acc[m][r] = zero();
  for (int64_t k = 0; k < padded; k += kLanes) {
    Floats w[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = load(decoded + r * padded + k);
    for (int m = 0; m < count; ++m) {
      const Floats v = load(x + m * padded + k);
      for (int r = 0; r < kRows; ++r) acc[m][r] = fma(w[r], v, acc[m][r]);
    }
  }
  for (int m = 0; m < count; ++m)
    for (int r = 0; r < kRows; ++r) out[m * kRows + r] = sum(acc[m][r]);
}

}  // namespace te_models
