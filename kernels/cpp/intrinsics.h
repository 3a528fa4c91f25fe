// The intrinsics of x86 with AVX2. GCC's <immintrin.h> declares those of every processor, and reading it takes most of
// the time of a small library: without AVX-512, the headers of what this processor has are read in its place. Each
// refuses to be included first, by the macro that <immintrin.h> defines.

#pragma once

#if defined(__GNUC__) && !defined(__clang__) && !defined(__AVX512F__) && __has_include(<avx2intrin.h>)
#include <nmmintrin.h>
#define _IMMINTRIN_H_INCLUDED
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#include <shaintrin.h>
#else
#include <immintrin.h>
#endif
