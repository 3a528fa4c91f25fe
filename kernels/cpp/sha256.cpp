// SHA-256 of several messages at once (FIPS 180-4), by the x86 instructions for it.
//
// An instruction for two rounds takes four cycles, and a processor begins one every cycle or two: one message keeps it
// waiting. Several messages of the same length, whose rounds take turns, do not: two are 1.8 times as fast as one,
// four 2.7 times (Zen 4).

#if !defined(__SHA__) || !defined(__SSE4_1__)
#error the processor has no instructions for SHA-256
#endif
#include <cstdint>
#include <cstring>

#include "intrinsics.h"

namespace te_models {

#define INLINE __attribute__((always_inline)) static inline

#if defined(__AVX512VL__)
constexpr int kMost = 4;  // messages whose words, four registers each, fit 32 registers
#else
constexpr int kMost = 2;
#endif
constexpr int64_t kBlock = 64, kDigest = 32;

// the first 32 bits of the fractional parts of the cube roots of the first 64 primes
alignas(16) const uint32_t kConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

INLINE __m128i load(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
INLINE void store(uint8_t* p, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }
INLINE __m128i big_endian(__m128i words) {
  return _mm_shuffle_epi8(words, _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
}

// The hash value's words as the instructions have them, from the highest to the lowest: a, b, e, f and c, d, g, h.
struct Hash {
  __m128i abef, cdgh;
  INLINE Hash first() {
    return {_mm_set_epi32(0x6a09e667, 0xbb67ae85, 0x510e527f, 0x9b05688c),
            _mm_set_epi32(0x3c6ef372, 0xa54ff53a, 0x1f83d9ab, 0x5be0cd19)};
  }
};

template <int messages>
INLINE void add_blocks(Hash (&hash)[messages], const uint8_t* const (&data)[messages], int64_t count) {
  for (int64_t block = 0; block < count; ++block) {
    __m128i words[messages][4];  // of the rounds to come, in a ring
    Hash found[messages];
    for (int i = 0; i < messages; ++i) {
      found[i] = hash[i];
      for (int j = 0; j < 4; ++j) words[i][j] = big_endian(load(data[i] + kBlock * block + 16 * j));
    }
#pragma GCC unroll 16
    for (int four = 0; four < 16; ++four) {  // rounds at a time
      const __m128i constants = load(reinterpret_cast<const uint8_t*>(kConstants + 4 * four));
#pragma GCC unroll 4
      for (int i = 0; i < messages; ++i) {
        __m128i& word = words[i][four % 4];
        const __m128i added = _mm_add_epi32(word, constants);
        found[i].cdgh = _mm_sha256rnds2_epu32(found[i].cdgh, found[i].abef, added);
        found[i].abef = _mm_sha256rnds2_epu32(found[i].abef, found[i].cdgh, _mm_shuffle_epi32(added, 0x0E));
        if (four < 12) {
          const __m128i third = words[i][(four + 2) % 4], fourth = words[i][(four + 3) % 4];
          const __m128i sum = _mm_sha256msg1_epu32(word, words[i][(four + 1) % 4]);
          word = _mm_sha256msg2_epu32(_mm_add_epi32(sum, _mm_alignr_epi8(fourth, third, 4)), fourth);
        }
      }
    }
    for (int i = 0; i < messages; ++i) {
      hash[i].abef = _mm_add_epi32(hash[i].abef, found[i].abef);
      hash[i].cdgh = _mm_add_epi32(hash[i].cdgh, found[i].cdgh);
    }
  }
}

// The digests of messages of `size` bytes that follow one another.
template <int messages>
void digest(const uint8_t* data, int64_t size, uint8_t* out) {
  Hash hash[messages];
  const uint8_t* parts[messages];
  for (int i = 0; i < messages; ++i) hash[i] = Hash::first(), parts[i] = data + size * i;
  add_blocks<messages>(hash, parts, size / kBlock);
  uint8_t last[messages][2 * kBlock] = {};  // the bytes that fill no block, a bit, and the length in bits at the end
  const int64_t left = size % kBlock, blocks = left + 9 > kBlock ? 2 : 1;
  for (int i = 0; i < messages; ++i) {
    std::memcpy(last[i], parts[i] + size - left, left);
    last[i][left] = 0x80;
    for (int byte = 0; byte < 8; ++byte) last[i][kBlock * blocks - 1 - byte] = uint8_t(uint64_t(size) * 8 >> 8 * byte);
    parts[i] = last[i];
  }
  add_blocks<messages>(hash, parts, blocks);
  for (int i = 0; i < messages; ++i) {
    const __m128i low = _mm_unpackhi_epi64(hash[i].cdgh, hash[i].abef);   // d, c, b, a
    const __m128i high = _mm_unpacklo_epi64(hash[i].cdgh, hash[i].abef);  // h, g, f, e
    store(out + kDigest * i, big_endian(_mm_shuffle_epi32(low, 0x1B)));
    store(out + kDigest * i + 16, big_endian(_mm_shuffle_epi32(high, 0x1B)));
  }
}

}  // namespace te_models

// Write the digests of `count` messages of `size` bytes that follow one another, 32 bytes each.
extern "C" void te_sha256(const uint8_t* data, int64_t count, int64_t size, uint8_t* out) {
  using namespace te_models;
  int64_t i = 0;
  for (; i + kMost <= count; i += kMost) digest<kMost>(data + size * i, size, out + kDigest * i);
  for (; i + 2 <= count; i += 2) digest<2>(data + size * i, size, out + kDigest * i);
  for (; i < count; ++i) digest<1>(data + size * i, size, out + kDigest * i);
}
