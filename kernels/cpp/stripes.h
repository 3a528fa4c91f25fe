// The operations that quantize in a CPU graph: one pass over a stripe of blocks after the other.
//
// Each is compiled once for a format and the dtypes of its input and its result (`INPUT`, `RESULT`).
//
// A transcription of the definitions in `fp8.reference`, `fp8.rounding`, `nvfp4.reference`, `hadamard` and `random`,
// in the same float32 arithmetic and the same order, so with the same bits; what each step is for is said there.
// Matrices are contiguous: B of them, R rows, C columns. A stripe is the blocks that lie side by side: `br` rows.

#pragma once

#include "rounding.h"

namespace te_models {

// What rounds finite magnitudes in vectors; random: of stochastic rounding, a word for each.
template <class F>
struct Nearest {
  INLINE inline Floats operator()(Floats magnitude, const uint32_t*) const { return Rounded<F>(magnitude).value; }
};

struct NoRandomWords {
  const uint32_t* operator()(int64_t, int64_t, int64_t, std::vector<uint32_t>&) const { return nullptr; }
  int64_t pitch() const { return 0; }
};

// Round every stripe. scales(magnitudes, matrix, block row, before, after): of all of its blocks. round(value, random):
// of any number; in_lanes: of finite ones, as `Nearest`. is_exact(after): whether the result's dtype has every number
// of the format times that scale. random_words(matrix, begin, end, memory): of the elements of rows begin ... end - 1,
// a row every pitch() words, in a thread's memory, or none.
template <class Scales, class Round, class InLanes, class IsExact, class RandomWords>
void stripes(const X* x, Y* out, int64_t B, int64_t R, int64_t C, int64_t br, int64_t bc, int threads,
             const Scales& scales, const Round& round, const InLanes& in_lanes, const IsExact& is_exact,
             const RandomWords& random_words) {
  const int64_t down = (R + br - 1) / br, across = (C + bc - 1) / bc;
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint32_t> largest(across), columns(C), memory;
    std::vector<float> before(across), after(across);
    uint32_t* const m = largest.data();
    float* const s = before.data();
    float* const t = after.data();
#pragma omp for
    for (int64_t stripe = 0; stripe < B * down; ++stripe) {
      const int64_t matrix = stripe / down, block_row = stripe % down;
      const int64_t begin = block_row * br, end = std::min(begin + br, R);
      largest_magnitudes(x + (matrix * R + begin) * C, end - begin, C, bc, columns.data(), m);
      scales(m, matrix, block_row, s, t);
      uint32_t any = 0;
      bool exact = true, signed_as_x = true;  // what lanes write: not by a negative amax
      for (int64_t b = 0; b < across; ++b)
        any = std::max(any, m[b]), exact &= is_exact(t[b]), signed_as_x &= bits_of(t[b]) < 0x7F800000;
      const bool finite_stripe = any < 0x7F800000 && signed_as_x;
      const uint32_t* const random = random_words(matrix, begin, end, memory);
      const auto round_row = [&](int64_t r, auto writes_exactly) {
        const X* const row = x + (matrix * R + r) * C;
        Y* const to = out + (matrix * R + r) * C;
        const int64_t first = (r - begin) * random_words.pitch();
        const auto word = [=](int64_t c) { return random == nullptr ? nullptr : random + first + c; };
        const auto round_lanes = [&](int64_t c, Floats scale, Floats inverse) {
          const Words u = read_bits(row + c);
          const Floats rounded = in_lanes(float_of(u & 0x7FFFFFFF) * scale, word(c));
          write<writes_exactly.value>(to + c, with_sign(rounded * inverse, u));
        };
        int64_t c = 0;
        if (bc == 1) {
          if (finite_stripe)
            for (; c + kLanes <= C; c += kLanes) round_lanes(c, load<Floats>(s + c), load<Floats>(t + c));
#pragma omp simd
          for (int64_t i = c; i < C; ++i) to[i] = Y::write(round(X::read(row[i]) * s[i], word(i)) * t[i]);
          return;
        }
        // asking after each block of 16 what is left of it takes a third of the time again
        if (finite_stripe && bc % kLanes == 0 && C % bc == 0) {
          for (int64_t b = 0; b < across; ++b) {
            const Floats scale = all(s[b]), inverse = all(t[b]);
            for (const int64_t stop = c + bc; c < stop; c += kLanes) round_lanes(c, scale, inverse);
          }
          return;
        }
        for (int64_t b = 0; b < across; ++b) {
          const int64_t stop = std::min((b + 1) * bc, C);
          const float scale = s[b], inverse = t[b];
          if (finite_stripe)
            for (; c + kLanes <= stop; c += kLanes) round_lanes(c, all(scale), all(inverse));
#pragma omp simd
          for (int64_t i = c; i < stop; ++i) to[i] = Y::write(round(X::read(row[i]) * scale, word(i)) * inverse);
          c = stop;
        }
      };
      for (int64_t r = begin; r < end; ++r) exact ? round_row(r, std::true_type{}) : round_row(r, std::false_type{});
    }
  }
}

}  // namespace te_models
using namespace te_models;

// [rows, columns] -> the largest magnitude of each row
extern "C" void te_row_amax(const X* x, float* out, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t c = 0; c < columns; ++c) largest = std::max(largest, X::magnitude(x[r * columns + c]));
    out[r] = float_of(largest);
  }
}
