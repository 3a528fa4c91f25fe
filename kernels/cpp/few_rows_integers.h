// How integers of four or eight bits are decoded: value = (code - zero) * scale, by group of a row.
//
// Four bits have 16 values in a group: a table has what each of them dequantizes to, its rounding to bfloat16 included,
// and a code is looked up. Eight bits are converted and rounded one by one.

#pragma once

#include "few_rows_decode.h"

namespace te_models {

enum ScaleKind { kScaleBFloat16, kScaleFloat16, kScaleFloat32 };

inline float float_of_half(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }

struct Tables {
  const uint8_t* zeros;  // of each group, where the scales are, or null
  Tables(const Weight&, const float* of_groups) : zeros(reinterpret_cast<const uint8_t*>(of_groups)) {}
};

inline float rounded(float value) { return X::read(X::write(value)); }

// (code - zero) * scale, rounded to X: of scales far from the ends of float32, 2^16 of a value less what is more than
// that leaves the eight bits of a bfloat16
INLINE inline Floats values_of(Floats difference, Floats scale) {
  const Floats v = mul(difference, scale);
  if constexpr (!X::rounds) return v;
  const Floats m = mul(v, all(0x1p16f));
  return sub(m, sub(m, v));
}

inline Floats steps_from(float first) {
  alignas(64) static const float from_zero[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return add(load(from_zero), all(first));
}

#if defined(WIDE)
using Codes = __m512i;
INLINE inline Codes wide_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE inline Floats floats(Codes c) { return _mm512_cvtepi32_ps(c); }
// What the 16 codes of a group stand for, those below `zero` negative.
struct Group {
  Floats table;
  INLINE void fill(Floats from_zero, Floats, Floats scale) { table = values_of(from_zero, scale); }
  INLINE void fill_carefully(const float* values) { table = load(values); }
  INLINE Floats even(Codes pairs) const { return _mm512_permutexvar_ps(pairs, table); }
  INLINE Floats odd(Codes pairs) const { return _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table); }
};
#else
using Codes = __m256i;
INLINE inline Codes wide_bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
INLINE inline Floats floats(Codes c) { return _mm256_cvtepi32_ps(c); }
struct Group {
  Floats low, high;  // of codes below 8, and of others
  INLINE void fill(Floats from_zero, Floats from_eight, Floats scale) {
    low = values_of(from_zero, scale);
    high = values_of(from_eight, scale);
  }
  INLINE void fill_carefully(const float* values) { low = load(values), high = load(values + 8); }
  INLINE Floats found(Codes codes, Codes in_sign) const {
    const Floats a = _mm256_permutevar8x32_ps(low, codes), b = _mm256_permutevar8x32_ps(high, codes);
    return _mm256_blendv_ps(a, b, _mm256_castsi256_ps(in_sign));
  }
  INLINE Floats even(Codes pairs) const { return found(pairs, _mm256_slli_epi32(pairs, 28)); }
  INLINE Floats odd(Codes pairs) const { return found(_mm256_srli_epi32(pairs, 4), _mm256_slli_epi32(pairs, 24)); }
};
#endif

// Columns of a step, and where column k of a row lies among those that are multiplied: of kLanes bytes first the even
// codes.
constexpr int64_t kStep = W::bits == 4 ? 2 * kLanes : kLanes;
inline int64_t place_of(int64_t k) {
  const int64_t within = k % kStep;
  return W::bits == 8 ? k : k - within + within % 2 * kLanes + within / 2;
}

struct Rows {
  const uint8_t* zeros;
  std::vector<float> scale, zero;

  template <class Read>
  static bool read_scales(int64_t blocks, float* to, const Read& read) {
    uint32_t strange = 0;
#pragma omp simd reduction(| : strange)
    for (int64_t b = 0; b < blocks; ++b) {
      to[b] = read(b);
      const uint32_t u = bits_of(to[b]) & 0x7FFFFFFF;
      strange |= uint32_t(u != 0) & uint32_t(u - 0x0D800000u > 0x6C800000u - 0x0D800000u);  // 2^-100, 2^90
    }
    return strange == 0;
  }

  // Read scales and zeros of a row, which lie side by side; return whether the scales are ordinary numbers.
  bool read(const Weight& w, int64_t row, int64_t blocks, float* scales, float* zero_points) const {
    const int64_t begin = row * w.down;
    if (zeros != nullptr)
      for (int64_t b = 0; b < blocks; ++b) zero_points[b] = float(zeros[begin + b]);
    if (w.kind == kScaleFloat32) {
      const float* const p = static_cast<const float*>(w.scale) + begin;
      return read_scales(blocks, scales, [p](int64_t b) { return p[b]; });
    }
    const uint16_t* const p = static_cast<const uint16_t*>(w.scale) + begin;
    if (w.kind == kScaleBFloat16)
      return read_scales(blocks, scales, [p](int64_t b) { return float_of(uint32_t(p[b]) << 16); });
    int64_t done = 0;
    for (; done + 8 <= blocks; done += 8)
      _mm256_storeu_ps(scales + done, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + done))));
    for (; done < blocks; ++done) scales[done] = float_of_half(p[done]);
    return read_scales(blocks, scales, [scales](int64_t b) { return scales[b]; });
  }

  static Floats first_of(Floats v, int64_t count) {
    float lanes[kLanes];
    store(lanes, v);
    for (int64_t i = count; i < kLanes; ++i) lanes[i] = 0;
    return load(lanes);
  }

  template <bool careful, bool zeroed, class Use>
  INLINE void run(const Weight& w, const uint8_t* const* row, int64_t blocks, const Use& use) {
    constexpr float middle = 1 << (W::bits - 1);
    const int64_t K = w.K, L = w.block_columns;
    const Floats below = steps_from(-middle), above = steps_from(8 - middle);
    for (int64_t b = 0; b < blocks; ++b) {
      Group group[kRows];
      Floats s[kRows], z[kRows];
      each_row([&](auto r) INLINE {
        const float one = scale[r * blocks + b], none = zeroed ? zero[r * blocks + b] : middle;
        s[r] = all(one);
        z[r] = all(none);
        if constexpr (W::bits == 4 && careful) {
          float values[16];
          for (int i = 0; i < 16; ++i) values[i] = rounded((float(i) - none) * one);
          group[r].fill_carefully(values);
        } else if constexpr (W::bits == 4) {
          const Floats from_zero = zeroed ? sub(steps_from(0), z[r]) : below;
          group[r].fill(from_zero, zeroed ? add(from_zero, all(8.0f)) : above, s[r]);
        }
      });
      // left: columns that there are, which a value that is not finite makes matter: 0 times it is no 0
      const auto values = [&](int64_t k, auto r, const uint8_t* p, int64_t left) INLINE {
        const Codes codes = wide_bytes(p);
        if constexpr (W::bits == 4 && careful) {
          use(k, r, first_of(group[r].even(codes), (left + 1) / 2));
          use(k + kLanes, r, first_of(group[r].odd(codes), left / 2));
        } else if constexpr (W::bits == 4) {
          use(k, r, group[r].even(codes));
          use(k + kLanes, r, group[r].odd(codes));
        } else if constexpr (careful) {
          float lanes[kLanes];
          store(lanes, sub(floats(codes), z[r]));
          for (float& lane : lanes) lane = rounded(lane * scale[r * blocks + b]);
          use(k, r, first_of(load(lanes), left));
        } else {
          use(k, r, values_of(sub(floats(codes), z[r]), s[r]));
        }
      };
      const int64_t end = std::min((b + 1) * L, K);
      int64_t k = b * L;
      for (; k + kStep <= end; k += kStep)
        each_row([&](auto r) INLINE {
          const uint8_t* const p = row[r] + k * W::bits / 8;
          soon(p + kRows * w.stride);
          values(k, r, p, kStep);
        });
      if (k < end)  // of the last group alone
        each_row([&](auto r) INLINE {
          uint8_t last[kLanes] = {};
          std::memcpy(last, row[r] + k * W::bits / 8, ((end - k) * W::bits + 7) / 8);
          values(k, r, last, end - k);
        });
    }
  }

  template <int rows, class Restart, class Use>
  INLINE void decode(const Weight& w, int64_t n, int64_t N, const Restart&, const Use& use) {
    static_assert(rows == kRows, "scales and zero points of more take the registers of the sums");
    const int64_t blocks = (w.K + w.block_columns - 1) / w.block_columns;
    scale.resize(kRows * blocks);
    zero.resize(kRows * blocks);
    const uint8_t* row[kRows];
    bool ordinary = true;
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = std::min(n + r, N - 1);
      row[r] = w.data + at * w.stride;
      ordinary &= read(w, at, blocks, scale.data() + r * blocks, zero.data() + r * blocks);
    }
    if (ordinary) zeros == nullptr ? run<false, false>(w, row, blocks, use) : run<false, true>(w, row, blocks, use);
    else zeros == nullptr ? run<true, false>(w, row, blocks, use) : run<true, true>(w, row, blocks, use);
  }
};
inline Rows rows_of(const Tables& tables) { return {tables.zeros, {}, {}}; }

}  // namespace te_models
