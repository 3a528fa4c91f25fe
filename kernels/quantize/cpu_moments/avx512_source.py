"""The C++ of an AdamW step on a block of FP8 moments in AVX-512: the block stays in registers until it is rounded.

For blocks of which nothing is special: every moment is zero or a normal number of E4M3 before the step, and a normal
one after it. The formula is that of `adamw_source`, the rounding that of `source.normal_code`, with the same bits in
fewer instructions: what those two compare and add up is exact, so that it may be fused or added to the number.
"""

AVX512 = r"""
#if defined(__AVX512BW__) && defined(__AVX512DQ__)
namespace te_models::avx512 {

using Floats = __m512;
using Words = __m512i;
constexpr int kLanes = 16, kVectors = int(kBlock) / kLanes;

INLINE Floats all(float f) { return _mm512_set1_ps(f); }
INLINE Words all(uint32_t word) { return _mm512_set1_epi32(int(word)); }
INLINE Words words(Floats x) { return _mm512_castps_si512(x); }
INLINE Floats floats(Words x) { return _mm512_castsi512_ps(x); }
INLINE Words mixed_with_higher(Words x, int bits) { return _mm512_xor_si512(x, _mm512_srli_epi32(x, bits)); }
INLINE __m128i sixteen(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

INLINE Floats read(const Float32* p) { return _mm512_loadu_ps(&p->value); }
INLINE Floats read(const BFloat16* p) {
  const Words x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return floats(_mm512_slli_epi32(x, 16));
}
// numbers, of which none is NaN
INLINE void write(Float32* p, Floats v) { _mm512_storeu_ps(&p->value, v); }
INLINE void write(BFloat16* p, Floats v) {
  const Words u = words(v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), all(1u));
  const Words rounded = _mm512_add_epi32(_mm512_add_epi32(u, all(0x7FFFu)), odd);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
INLINE void write_bytes(uint8_t* p, Words x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}

// Whether all moments of a block are zero or normal numbers, and those of the second one have no sign.
INLINE bool plain(const Stored& from) {
  const Words nan = _mm512_set1_epi8(0x7F), one = _mm512_set1_epi8(1), normal = _mm512_set1_epi8(7);
  __mmask64 special = 0;
  for (int64_t i = 0; i < kBlock; i += 64) {
    const Words a = _mm512_and_si512(_mm512_loadu_si512(from.first + i), nan);
    const Words b = _mm512_loadu_si512(from.second + i);
    special |= _mm512_cmpeq_epi8_mask(a, nan) | _mm512_cmpge_epu8_mask(b, nan);
    special |= _mm512_cmplt_epu8_mask(_mm512_sub_epi8(a, one), normal);  // less one, a zero is the largest byte
    special |= _mm512_cmplt_epu8_mask(_mm512_sub_epi8(b, one), normal);
  }
  return !special;
}

// The numbers between which the magnitudes of a block lie.
struct Magnitudes {
  Floats least = all(INFINITY), largest = all(0.0f);
  INLINE void add(Floats x) {
    least = _mm512_range_ps(least, x, 0b1010), largest = _mm512_range_ps(largest, x, 0b1011);
  }
  INLINE Range range() const {
    return {bits_of(_mm512_reduce_min_ps(least)), bits_of(_mm512_reduce_max_ps(largest))};
  }
};

// `advance` of sixteen elements, whose moments are bytes, to be multiplied with 2^120 of their scales.
template <bool far>
INLINE Floats advance(const Y* weight, const X* gradient, const uint8_t* first, const uint8_t* second, Floats scale,
                      Floats second_scale, const Step& s, Floats* x, Floats* root) {
  const Words a = _mm512_slli_epi32(_mm512_cvtepi8_epi32(sixteen(first)), 20);
  const Words b = _mm512_slli_epi32(_mm512_cvtepu8_epi32(sixteen(second)), 20);
  const Floats former = _mm512_mul_ps(floats(_mm512_and_si512(a, all(0x87F00000u))), scale);
  const Floats former_root = _mm512_mul_ps(floats(b), second_scale), g = read(gradient);
  const Floats difference = _mm512_sub_ps(g, former);
  *x = _mm512_fmadd_ps(all(far ? s.lerp - 1.0f : s.lerp), difference, far ? g : former);
  const Floats own = _mm512_mul_ps(all(s.own_square), g), square = _mm512_mul_ps(former_root, former_root);
  *root = _mm512_sqrt_ps(_mm512_fmadd_ps(own, g, _mm512_mul_ps(square, all(s.beta2))));
  const Floats divisor = _mm512_add_ps(_mm512_div_ps(*root, all(s.root_correction)), all(s.epsilon));
  const Floats moved = _mm512_div_ps(_mm512_mul_ps(all(s.size), *x), divisor);
  return _mm512_add_ps(_mm512_mul_ps(read(weight), all(s.decay)), moved);
}

// `normal_code` of sixteen first moments, times their scale. random: in the lower 16 bits.
INLINE Words codes(Floats scaled, Words random) {
  const Words u = words(scaled);
  const Words magnitude = _mm512_min_epu32(_mm512_and_si512(u, all(0x7FFFFFFFu)), all(0x43E00000u));
  // 2^20 - 1 less the random number in the bits that are rounded carries where these are larger; and - 960 above them
  const Words less = _mm512_slli_epi32(random, 4);
  const Words added = _mm512_ternarylogic_epi32(less, all(0x000FFFF0u), all(0xC400000Fu), 0xAE);  // ~a & b | c
  const Words code = _mm512_srli_epi32(_mm512_add_epi32(magnitude, added), 20);
  return _mm512_ternarylogic_epi32(code, _mm512_srli_epi32(u, 24), all(0x80u), 0xF8);  // a | b & c
}

// The same of roots. random: below 2^16.
INLINE Words root_codes(Floats scaled, Words random) {
  const Words magnitude = _mm512_min_epu32(words(scaled), all(0x43E00000u));
  const Words units = _mm512_ternarylogic_epi32(magnitude, all(0x007FFFFFu), all(0x41000000u), 0xEA);  // a & b | c
  const Floats m = floats(units), k = floats(_mm512_and_si512(units, all(0xFFF00000u)));
  const Floats above = _mm512_fnmadd_ps(k, k, _mm512_mul_ps(m, m));
  const Floats width = _mm512_fmadd_ps(k, all(0x1p-15f), all(0x1p-16f));
  const Floats missing = _mm512_fmsub_ps(_mm512_cvtepi32_ps(random), width, above);  // negative: up
  const Words below = _mm512_srli_epi32(_mm512_add_epi32(magnitude, all(0xC4000000u)), 20);
  return _mm512_sub_epi32(below, _mm512_srai_epi32(words(missing), 31));
}

// `mixed(mixed(x ^ k0) + k1)` but for the last step, from x ^ k0 ^ ((x ^ k0) >> 16).
INLINE Words hashed(Words x, uint32_t k1) {
  x = mixed_with_higher(_mm512_mullo_epi32(x, all(0x7FEB352Du)), 15);
  x = mixed_with_higher(_mm512_mullo_epi32(x, all(0x846CA68Bu)), 16);
  x = mixed_with_higher(_mm512_add_epi32(x, all(k1)), 16);
  x = mixed_with_higher(_mm512_mullo_epi32(x, all(0x7FEB352Du)), 15);
  return _mm512_mullo_epi32(x, all(0x846CA68Bu));
}

// One step of a whole block; false where it is left as it is, because something about it is special. counter: the
// number of its first element, a multiple of the block's size.
template <bool far>
inline bool step_plain_block(Y* weight, const X* gradient, const Stored& stored, uint32_t counter, const Step& s,
                             uint32_t k0, uint32_t k1) {
  if (!plain(stored)) return false;
  const Floats scale = all(*stored.first_scale * 0x1p120f), second_scale = all(*stored.second_scale * 0x1p120f);
  Floats x[kVectors], root[kVectors];
  Y updated[kBlock];
  Magnitudes of_first, of_root;
  __mmask16 nan = 0;
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) {
    const int i = j * kLanes;
    const Floats w = advance<far>(weight + i, gradient + i, stored.first + i, stored.second + i, scale, second_scale, s,
                                  x + j, root + j);
    write(updated + i, w);
    of_first.add(x[j]), of_root.add(root[j]);
    nan |= _mm512_cmp_ps_mask(w, w, _CMP_UNORD_Q);  // so is a weight where one of its moments is
  }
  const Range first = of_first.range(), second = of_root.range();
  const Scale to_first = first.scale(), to_second = second.scale();
  if (nan || !first.normal(to_first) || !second.normal(to_second)) return false;
  std::memcpy(weight, updated, sizeof updated);
  *stored.first_scale = to_first.after, *stored.second_scale = to_second.after;
  const Floats before = all(to_first.before), before_second = all(to_second.before);
  // element i of the block has the number counter | i, which differs from counter in the lowest bits alone
  const uint32_t base = counter ^ k0;
  const Words lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const Words numbers = _mm512_xor_si512(all(base ^ (base >> 16)), lanes);
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) {
    const int i = j * kLanes;
    const Words bits = hashed(_mm512_xor_si512(numbers, all(uint32_t(i))), k1), high = _mm512_srli_epi32(bits, 16);
    write_bytes(stored.first + i, codes(_mm512_mul_ps(x[j], before), _mm512_xor_si512(bits, high)));
    write_bytes(stored.second + i, root_codes(_mm512_mul_ps(root[j], before_second), high));
  }
  return true;
}

}  // namespace te_models::avx512
#else
namespace te_models::avx512 {
template <bool far>
inline bool step_plain_block(Y*, const X*, const Stored&, uint32_t, const Step&, uint32_t, uint32_t) { return false; }
}  // namespace te_models::avx512
#endif
"""
