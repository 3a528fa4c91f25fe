// An AdamW step on a block of FP8 moments in vectors: the block stays in registers until it is rounded.
//
// For blocks of which nothing is special: moments are zero or normal numbers of E4M3 before the step, and normal ones
// after it. The formula is that of `adamw_step.h`, the rounding that of `normal_code` in moments.h, with the same bits
// in fewer instructions: what those two compare and add up is exact, so that it may be fused or added to the number.
// The vectors are those of simd.h.

#pragma once

#include "adamw_step.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
namespace te_models {

constexpr int kVectors = int(kBlock) / kLanes;

#if defined(WIDE)
INLINE inline Words read_signed(const uint8_t* p) { return Words(_mm512_cvtepi8_epi32(__m128i(load<Bytes>(p)))); }
INLINE inline Floats square_root(Floats x) { return Floats(_mm512_sqrt_ps(__m512(x))); }
#else
INLINE inline Words read_signed(const uint8_t* p) {
  return Words(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
INLINE inline Floats square_root(Floats x) { return Floats(_mm256_sqrt_ps(__m256(x))); }
#endif

// The bits of the magnitudes between which those of a block lie.
struct Magnitudes {
  Words least = all(kInfinity), largest = all(0u);
  INLINE inline void add(Words x) { least = smaller(least, x), largest = larger(largest, x); }
  INLINE inline Range range() const { return {~largest_of(~least), largest_of(largest)}; }
};

// `advance` of a vector of elements, whose moments are bytes: zeros or normal numbers, whose bits as those of a float32
// are 2^-120 of their values. scale, second_scale: 2^120 of theirs.
template <bool far>
INLINE inline Floats advance(const Y* weight, const X* gradient, const uint8_t* first, const uint8_t* second,
                             Floats scale, Floats second_scale, const Step& s, Floats* x, Floats* root) {
  const Floats former = float_of(read_signed(first) << 20 & 0x87F00000) * scale;
  const Floats former_root = float_of(read_signed(second) << 20 & 0x07F00000) * second_scale;
  const Floats g = float_of(read_bits(gradient));
  *x = fma(all(far ? s.lerp - 1.0f : s.lerp), g - former, far ? g : former);
  *root = square_root(fma(all(s.own_square) * g, g, former_root * former_root * all(s.beta2)));
  const Floats moved = all(s.size) * *x / (*root / all(s.root_correction) + all(s.epsilon));
  return float_of(read_bits(weight)) * all(s.decay) + moved;
}

// `normal_code` of first moments, times their scale. random: in the lower 16 bits.
INLINE inline Words codes(Floats scaled, Words random) {
  const Words u = bits_of(scaled), magnitude = smaller(u & 0x7FFFFFFF, all(0x43E00000u));
  // 2^20 - 1 less the random number in the bits that are rounded carries where these are larger; and - 960 above them
  const Words added = (~(random << 4) & 0x000FFFF0) | 0xC400000F;
  return (magnitude + added) >> 20 | (u >> 24 & 0x80);
}

// The same of roots. random: below 2^16.
INLINE inline Words root_codes(Floats scaled, Words random) {
  const Words magnitude = smaller(bits_of(scaled), all(0x43E00000u));
  const Words units = (magnitude & 0x007FFFFF) | 0x41000000;
  const Floats m = float_of(units), k = float_of(units & 0xFFF00000);
  const Floats above = fma(-k, k, m * m), width = fma(k, all(0x1p-15f), all(0x1p-16f));
  const Floats missing = fma(__builtin_convertvector(Integers(random), Floats), width, -above);  // negative: up
  return ((magnitude + 0xC4000000) >> 20) - Words(Integers(missing) >> 31);
}

INLINE inline Words mixed_with_higher(Words x, int bits) { return x ^ x >> bits; }

// `mixed(mixed(x ^ k0) + k1)` but for the last step, from x ^ k0 ^ ((x ^ k0) >> 16).
INLINE inline Words hashed(Words x, uint32_t k1) {
  x = mixed_with_higher(x * 0x7FEB352Du, 15);
  x = mixed_with_higher(x * 0x846CA68Bu, 16);
  x = mixed_with_higher(mixed_with_higher(x + k1, 16) * 0x7FEB352Du, 15);
  return x * 0x846CA68Bu;
}

// One step of a whole block, whose moments are zeros or normal numbers; false where it is left as it is, because they
// would not all be normal. counter: the number of its first element, a multiple of the block's size.
template <bool far>
inline bool step_in_lanes(Y* weight, const X* gradient, const Stored& stored, uint32_t counter, const Step& s,
                          uint32_t k0, uint32_t k1) {
  const Floats scale = all(*stored.first_scale * 0x1p120f), second_scale = all(*stored.second_scale * 0x1p120f);
  Floats x[kVectors], root[kVectors];
  Y updated[kBlock];
  Magnitudes of_first, of_root;
#pragma GCC unroll 16
  for (int j = 0; j < kVectors; ++j) {
    const int i = j * kLanes;
    const Floats w = advance<far>(weight + i, gradient + i, stored.first + i, stored.second + i, scale, second_scale, s,
                                  x + j, root + j);
    write<false>(updated + i, w);
    of_first.add(bits_of(x[j]) & 0x7FFFFFFF), of_root.add(bits_of(root[j]));
  }
  const Range first = of_first.range(), second = of_root.range();
  const Scale to_first = first.scale(), to_second = second.scale();
  if (!first.normal(to_first) || !second.normal(to_second)) return false;  // nor with a NaN
  std::memcpy(weight, updated, sizeof updated);
  *stored.first_scale = to_first.after, *stored.second_scale = to_second.after;
  const Floats before = all(to_first.before), before_second = all(to_second.before);
  // element i of the block has the number counter | i, which differs from counter in the lowest bits alone
  const uint32_t base = counter ^ k0;
  Words numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = base ^ base >> 16 ^ uint32_t(i);
#pragma GCC unroll 16
  for (int j = 0; j < kVectors; ++j) {
    const int i = j * kLanes;
    const Words bits = hashed(numbers ^ uint32_t(i), k1), high = bits >> 16;
    write_bytes(stored.first + i, codes(x[j] * before, bits ^ high));
    write_bytes(stored.second + i, root_codes(root[j] * before_second, high));
  }
  return true;
}

}  // namespace te_models
#else
namespace te_models {
template <bool far>
inline bool step_in_lanes(Y*, const X*, const Stored&, uint32_t, const Step&, uint32_t, uint32_t) {
  return false;
}
}  // namespace te_models
#endif
