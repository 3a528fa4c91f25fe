// NVFP4: rounding to it, the random bits that it may draw, and the Hadamard transform before it.

#include "stripes.h"
#include "nvfp4.h"

namespace te_models {

template <bool stochastic>
inline float rounded_e2m1(float v, uint32_t random) {
  v = clamped(v, 6.0f);
  const float m = std::fabs(v);
  const float step = m < 2.0f ? 0.5f : (m < 4.0f ? 1.0f : 2.0f);
  const float ratio = m * (m < 2.0f ? 2.0f : (m < 4.0f ? 1.0f : 0.5f));
  float multiple;
  if (stochastic) {
    const float below = std::floor(ratio);
    const float drawn = float(random >> 8) * 0x1p-24f;
    multiple = below + (drawn < ratio - below ? 1.0f : 0.0f);
  } else {
    multiple = std::nearbyint(ratio);
  }
  return with_sign(multiple * step, v);
}

struct Drawn {
  INLINE inline Floats operator()(Floats magnitude, const uint32_t* random) const {
    return drawn<E2M1>(magnitude, load<Words>(random));
  }
};

// Philox4x32-10: four words of each counter (i, stream, step), under a seed.
struct Philox {
  int64_t seed, step, stream;
  static constexpr int64_t kVectors = 4;  // enough at once that no multiplication waits for another
  static constexpr int64_t kCounters = kVectors * kHalfLanes, kWords = 4 * kCounters;

  // The words of kCounters counters, one after another.
  INLINE inline void operator()(const uint32_t* counters, uint32_t* words) const {
    typedef uint32_t Counters __attribute__((vector_size(4 * kHalfLanes)));
    Pairs c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];  // of which the lower words count
    for (int64_t v = 0; v < kVectors; ++v) {
      c0[v] = __builtin_convertvector(load<Counters>(counters + v * kHalfLanes), Pairs);
      c1[v] = Pairs{} + uint32_t(stream);
      c2[v] = Pairs{} + uint32_t(uint64_t(step));
      c3[v] = Pairs{} + uint32_t(uint64_t(step) >> 32);
    }
    uint32_t k0 = uint32_t(uint64_t(seed)), k1 = uint32_t(uint64_t(seed) >> 32);
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) {
        const Pairs p0 = product(c0[v], 0xD2511F53u), p1 = product(c2[v], 0xCD9E8D57u);
        c0[v] = (p1 >> 32) ^ c1[v] ^ k0;
        c1[v] = p1;
        c2[v] = (p0 >> 32) ^ c3[v] ^ k1;
        c3[v] = p0;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int64_t v = 0; v < kVectors; ++v) {
      uint64_t first[kHalfLanes], second[kHalfLanes];
      store(first, (c0[v] & 0xFFFFFFFF) | c1[v] << 32);
      store(second, (c2[v] & 0xFFFFFFFF) | c3[v] << 32);
      for (int64_t i = 0; i < kHalfLanes; ++i) {
        std::memcpy(words + 4 * (v * kHalfLanes + i), first + i, 8);
        std::memcpy(words + 4 * (v * kHalfLanes + i) + 2, second + i, 8);
      }
    }
  }

  // The words of `counters` or more counters from the first one on.
  void from(uint64_t first, int64_t counters, uint32_t* words) const {
    for (int64_t begin = 0; begin < counters; begin += kCounters) {
      uint32_t these[kCounters];
      for (int64_t i = 0; i < kCounters; ++i) these[i] = uint32_t(first + begin + i);
      (*this)(these, words + 4 * begin);
    }
  }
};

// The random words of rows of matrices [R, C]: word i of the matrices one after another is that of their element i, or
// of element i of their transposes.
struct RandomWords {
  Philox philox;
  int64_t R, C;
  bool of_transpose;

  // A power of two between the words of a column would have them share the few places of one set of the cache.
  int64_t pitch() const { return of_transpose ? C + 16 : C; }

  const uint32_t* operator()(int64_t matrix, int64_t begin, int64_t end, std::vector<uint32_t>& memory) const {
    return of_transpose ? down(matrix, begin, end - begin, memory) : along(matrix, begin, end - begin, memory);
  }

  const uint32_t* along(int64_t matrix, int64_t begin, int64_t rows, std::vector<uint32_t>& memory) const {
    const int64_t first = (matrix * R + begin) * C, counters = (first % 4 + rows * C + 3) / 4;
    memory.resize(4 * counters + Philox::kWords);
    philox.from(first / 4, counters, memory.data());
    return memory.data() + first % 4;
  }

  // Words of some rows of a column follow one another, and are those of a few counters.
  const uint32_t* down(int64_t matrix, int64_t begin, int64_t rows, std::vector<uint32_t>& memory) const {
    memory.resize(rows * pitch());
    for (int64_t row = 0; row < rows; row += kRows)
      parts(matrix, begin + row, std::min(kRows, rows - row), memory.data() + row * pitch());
    return memory.data();
  }

  static constexpr int64_t kRows = 16;
  void parts(int64_t matrix, int64_t begin, int64_t rows, uint32_t* to) const {
    const int64_t each = R % 4 == 0 && begin % 4 == 0 ? kRows / 4 : kRows / 4 + 1;  // counters of a column
    const int64_t at_once = Philox::kCounters / each;
    uint32_t counters[Philox::kCounters] = {}, words[Philox::kWords];
    for (int64_t column = 0; column < C; column += at_once) {
      const int64_t columns = std::min(at_once, C - column), first = (matrix * C + column) * R + begin;
      for (int64_t c = 0; c < columns; ++c)
        for (int64_t i = 0; i < each; ++i) counters[c * each + i] = uint32_t(uint64_t(first + c * R) / 4 + i);
      philox(counters, words);
      for (int64_t c = 0; c < columns; ++c) {
        const uint32_t* const own = words + 4 * each * c + (first + c * R) % 4;
        for (int64_t r = 0; r < rows; ++r) to[r * pitch() + column + c] = own[r];
      }
    }
  }
};

}  // namespace te_models
using namespace te_models;

// key: the seed and the step of stochastic rounding, or none
extern "C" void te_round_nvfp4(const X* x, Y* out, int64_t B, int64_t R, int64_t C, int64_t br, int64_t bc,
                               const float* amax, int64_t by_matrix, int64_t by_row, int64_t by_column,
                               const int64_t* key, int64_t stream, int threads) {
  const int64_t across = (C + bc - 1) / bc;
  const auto scales = [=](const uint32_t* m, int64_t matrix, int64_t row, float* before, float* after) {
    const float* const first = amax + matrix * by_matrix + row * by_row;
    if (by_column == 0) return nvfp4_scales(m, across, global_encode(*first), before, after);
    for (int64_t b = 0; b < across; ++b)
      nvfp4_scales(m + b, 1, global_encode(first[b * by_column]), before + b, after + b);
  };
  // a multiple of 1/2 below 8 times one of 2^-9 with four bits is a number of bfloat16
  const auto exact = [](float) { return true; };
  if (key == nullptr) {
    const auto nearest = [](float v, const uint32_t*) { return rounded_e2m1<false>(v, 0); };
    stripes(x, out, B, R, C, br, bc, threads, scales, nearest, Nearest<E2M1>{}, exact, NoRandomWords{});
    return;
  }
  const auto stochastic = [](float v, const uint32_t* random) { return rounded_e2m1<true>(v, *random); };
  const RandomWords words{{key[0], key[1], stream}, R, C, bc == 1};  // blocks down the rows have the transpose's
  stripes(x, out, B, R, C, br, bc, threads, scales, stochastic, Drawn{}, exact, words);
}

// what decoding multiplies with, of each amax
extern "C" void te_global_decode(const float* amax, float* to, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = 1.0f / global_encode(amax[i]);
}

// bfloat16 [B, R, C] -> [B, R rounded up to 16, C]; signs: 16 factors of +-1/4
extern "C" void te_random_hadamard(const BFloat16* from, BFloat16* to, int64_t B, int64_t R, int64_t C,
                                   const float* signs, int threads) {
  constexpr int64_t width = 64;
  const int64_t groups = (R + 15) / 16, parts = (C + width - 1) / width;
#pragma omp parallel for num_threads(threads)
  for (int64_t task = 0; task < B * groups * parts; ++task) {
    const int64_t part = task % parts, group = task / parts % groups, matrix = task / parts / groups;
    const int64_t begin = part * width, count = std::min(width, C - begin);
    float members[16][width] = {};
    for (int i = 0; i < 16; ++i) {
      if (group * 16 + i >= R) {  // zeros with the signs of their rows
        std::fill_n(members[i], width, 0.0f * signs[i]);
        continue;
      }
      const BFloat16* const row = from + (matrix * R + group * 16 + i) * C + begin;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) members[i][c] = BFloat16::read(row[c]) * signs[i];
    }
    for (int h = 1; h < 16; h *= 2)
      for (int i = 0; i < 16; ++i)
        if (!(i & h))
#pragma omp simd
          for (int64_t c = 0; c < width; ++c) {
            const float a = members[i][c], b = members[i | h][c];
            members[i][c] = a + b;
            members[i | h][c] = a - b;
          }
    for (int i = 0; i < 16; ++i) {
      BFloat16* const row = to + ((matrix * groups + group) * 16 + i) * C + begin;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) row[c] = BFloat16::write(members[i][c]);
    }
  }
}
