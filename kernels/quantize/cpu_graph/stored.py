"""Quantizing to what is stored, and decoding that, in C++ for eager code on CPU: the bits of the definitions.

Eager torch makes a dozen passes over memory for a format, which is 2 to 5 ns an element. Loading this takes seconds,
so whoever has billions of elements to quantize calls `load_compiled`; from then on `eager.compiled` has the functions
below. Each returns None for what it does not serve: NaN, whose codes are the definition's, dtypes, E5M2.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from ..eager import compiled
from ..fp8.blocks import amax as largest
from ..fp8.reference import e8m0_to_float
from . import library, source

_CODE = r"""
namespace te_models {

// To nearest even, saturated: a normal number's bits are rounded as an integer, a subnormal one's count steps of 2^-9.
inline uint8_t e4m3_byte(float f) {
  float m = std::fabs(f);
  m = m > 448.0f ? 448.0f : m;
  const uint32_t u = bits_of(m);
  const uint32_t normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - (120u << 3);
  const uint32_t subnormal = bits_of(m + 16384.0f) - 0x46800000u;
  return uint8_t((u < 0x3C800000 ? subnormal : normal) | ((bits_of(f) >> 24) & 0x80));
}

struct E4M3 {
  uint8_t bits;
  static E4M3 write(float f) { return {e4m3_byte(f)}; }
};

struct Tables {
  float e4m3[256], e2m1[16];
  Tables() {
    for (int b = 0; b < 256; ++b) {
      const int exponent = (b >> 3) & 15, mantissa = b & 7;
      const float m = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
      const float value = (b & 127) == 127 ? std::numeric_limits<float>::quiet_NaN() : m;
      e4m3[b] = b & 128 ? -value : value;
    }
    const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (int c = 0; c < 16; ++c) e2m1[c] = c & 8 ? -magnitudes[c & 7] : magnitudes[c & 7];
  }
};
const Tables tables;

template <class S>
bool has_nan(const S* x, int64_t size, int threads) {
  uint32_t largest = 0;
#pragma omp parallel for simd num_threads(threads) reduction(max : largest)
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, S::magnitude(x[i]));
  return largest > 0x7F800000;
}

// scales: float32 of each block, or its E8M0 byte
template <class S>
int store_fp8(const S* x, uint8_t* data, void* scales, int64_t B, int64_t R, int64_t C, int64_t br, int64_t bc,
              int kind, float epsilon, float overflow, int threads) {
  if (has_nan(x, B * R * C, threads)) return 1;
  const int64_t down = (R + br - 1) / br, across = (C + bc - 1) / bc;
  stripes(
      x, reinterpret_cast<E4M3*>(data), B, R, C, br, bc, threads,
      [=](float amax, int64_t matrix, int64_t row, int64_t column) {
        const Scale scale = fp8_scale<false>(amax, kind, epsilon, overflow);
        const int64_t at = (matrix * down + row) * across + column;
        if (kind == kE8m0)
          static_cast<uint8_t*>(scales)[at] = uint8_t(bits_of(scale.after) >> 23);  // 2^-127 is subnormal: 0
        else
          static_cast<float*>(scales)[at] = scale.after;
        return Scale{scale.before, 1.0f};
      },
      [](float v, int64_t, int64_t, int64_t) { return v; });  // E4M3::write rounds
  return 0;
}

template <class D>
void load_fp8(const uint8_t* data, const float* scales, D* out, int64_t B, int64_t R, int64_t C, int64_t br, int64_t bc,
              int threads) {
  const int64_t down = (R + br - 1) / br, across = (C + bc - 1) / bc;
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < B * R; ++r) {
    const float* const scale = scales + (r / R * down + r % R / br) * across;
    const uint8_t* const from = data + r * C;
    D* const to = out + r * C;
    if (bc == 1) {
      for (int64_t c = 0; c < C; ++c) to[c] = D::write(tables.e4m3[from[c]] * scale[c]);
      continue;
    }
    for (int64_t b = 0; b < across; ++b) {
      const int64_t stop = std::min((b + 1) * bc, C);
      const float factor = scale[b];
      for (int64_t c = b * bc; c < stop; ++c) to[c] = D::write(tables.e4m3[from[c]] * factor);
    }
  }
}

// [R, C], C in whole blocks of 16, by blocks of br rows: codes of float32 sums (see `nvfp4.cpu`)
template <class S>
int store_nvfp4(const S* x, uint8_t* packed, uint8_t* scales, int64_t R, int64_t C, int64_t br, float amax,
                int threads) {
  if (amax != amax || has_nan(x, R * C, threads)) return 1;
  const int64_t across = C / 16, down = (R + br - 1) / br;
  const float encode = global_encode(amax), decode = 1.0f / encode, sixth = encode * float(1.0 / 6.0);
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint32_t> largest(across);
    std::vector<float> factors(across);
    std::vector<uint8_t> bytes(across), codes(C);
#pragma omp for
    for (int64_t stripe = 0; stripe < down; ++stripe) {
      const int64_t begin = stripe * br, end = std::min(begin + br, R);
      std::fill(largest.begin(), largest.end(), 0u);
      for (int64_t r = begin; r < end; ++r)
        for (int64_t b = 0; b < across; ++b) {
          const S* const block = x + r * C + 16 * b;
          uint32_t found = largest[b];
#pragma omp simd reduction(max : found)
          for (int c = 0; c < 16; ++c) found = std::max(found, S::magnitude(block[c]));
          largest[b] = found;
        }
#pragma omp simd
      for (int64_t b = 0; b < across; ++b) {
        const float scale = rounded_fp8<false>(float_of(largest[b]) * sixth), factor = 1.0f / (scale * decode);
        factors[b] = factor > kLargest ? kLargest : factor;
        bytes[b] = e4m3_byte(scale);
      }
      for (int64_t r = begin; r < end; ++r) {
        std::copy(bytes.begin(), bytes.end(), scales + r * across);
        for (int64_t b = 0; b < across; ++b) {
          const S* const block = x + r * C + 16 * b;
          const float factor = factors[b];
#pragma omp simd
          for (int c = 0; c < 16; ++c) {
            const float v = S::read(block[c]);
            float m = std::fabs(v * factor);
            m = m > 6.0f ? 6.0f : m;
            const int32_t fine = int32_t(bits_of(m + 8388606.0f)) + (0x4B800000 - 0x4AFFFFFC);
            const int32_t code = std::min(fine, int32_t(bits_of(m + 16777224.0f)));
            codes[16 * b + c] = uint8_t((code & 7) | ((bits_of(v) >> 28) & 8));
          }
        }
        uint8_t* const to = packed + r * (C / 2);
        for (int64_t i = 0; i < C / 2; ++i) to[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
      }
    }
  }
  return 0;
}

}  // namespace te_models

extern "C" int te_store_fp8(const void* x, int wide, uint8_t* data, void* scales, int64_t B, int64_t R, int64_t C,
                            int64_t br, int64_t bc, int kind, float epsilon, float overflow, int threads) {
  if (wide)
    return store_fp8(static_cast<const Float32*>(x), data, scales, B, R, C, br, bc, kind, epsilon, overflow, threads);
  return store_fp8(static_cast<const BFloat16*>(x), data, scales, B, R, C, br, bc, kind, epsilon, overflow, threads);
}

extern "C" void te_load_fp8(const uint8_t* data, const float* scales, void* out, int wide, int64_t B, int64_t R,
                            int64_t C, int64_t br, int64_t bc, int threads) {
  if (wide)
    load_fp8(data, scales, static_cast<Float32*>(out), B, R, C, br, bc, threads);
  else
    load_fp8(data, scales, static_cast<BFloat16*>(out), B, R, C, br, bc, threads);
}

extern "C" int te_store_nvfp4(const void* x, int wide, uint8_t* packed, uint8_t* scales, int64_t R, int64_t C,
                              int64_t br, float amax, int threads) {
  if (wide) return store_nvfp4(static_cast<const Float32*>(x), packed, scales, R, C, br, amax, threads);
  return store_nvfp4(static_cast<const BFloat16*>(x), packed, scales, R, C, br, amax, threads);
}

// codes times the scales of their blocks, exact
extern "C" void te_load_nvfp4(const uint8_t* packed, const uint8_t* scales, float* out, int64_t blocks, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t b = 0; b < blocks; ++b) {
    const float scale = tables.e4m3[scales[b]];
    float values[16];
    for (int c = 0; c < 16; ++c) values[c] = tables.e2m1[c] * scale;
    for (int i = 0; i < 8; ++i) {
      const uint8_t pair = packed[8 * b + i];
      out[16 * b + 2 * i] = values[pair & 15];
      out[16 * b + 2 * i + 1] = values[pair >> 4];
    }
  }
}
"""

_P, _N, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "te_store_fp8": (_P, _INT, _P, _P, *(_N,) * 5, _INT, _FLOAT, _FLOAT, _INT),
    "te_load_fp8": (_P, _P, _P, _INT, *(_N,) * 5, _INT),
    "te_store_nvfp4": (_P, _INT, _P, _P, *(_N,) * 3, _FLOAT, _INT),
    "te_load_nvfp4": (_P, _P, _P, _N, _INT),
}
_functions: dict[str, Any] = {}


def _load() -> None:
    for name, arguments in _ARGUMENTS.items():
        defined = {"INPUT": "BFloat16", "RESULT": "Float32"}
        function = library.compiled(source.COMMON + source.SCALES + _CODE, defined, name, arguments)
        function.restype = _INT if name.startswith("te_store") else None
        _functions[name] = function


def load_compiled() -> bool:
    """Let eager code on CPU quantize and decode with compiled functions from now on: whether it does. Without a C++
    compiler it does not, and the numbers are the same."""
    if not compiled and library.available(_load):
        compiled.update(
            quantize_blockwise=quantize_blockwise,
            dequantize_blockwise=dequantize_blockwise,
            quantize_nvfp4=quantize_nvfp4,
            decode_blocks=decode_blocks,
        )
    return bool(compiled)


def _wide(dtype: torch.dtype) -> int:
    return int(dtype == torch.float32)


def quantize_blockwise(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, epsilon: float
) -> tuple[Tensor, Tensor] | None:
    """See `fp8.reference.quantize_blockwise`."""
    if x.dtype not in library.DTYPES or fp8_dtype is not torch.float8_e4m3fn or x.numel() == 0:
        return None
    x = x.detach().contiguous()
    batch, rows, columns = math.prod(x.shape[:-2]), *x.shape[-2:]
    grid = (*x.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    scales = torch.empty(grid, dtype=torch.uint8 if scale_kind == "e8m0" else torch.float32)
    data = torch.empty(x.shape, dtype=torch.uint8)
    how = (library.KINDS.index(scale_kind), epsilon, torch.finfo(x.dtype).max, torch.get_num_threads())
    sizes = (batch, rows, columns, *block)
    pointers = (data.data_ptr(), scales.data_ptr())
    failed = _functions["te_store_fp8"](x.data_ptr(), _wide(x.dtype), *pointers, *sizes, *how)
    return None if failed else (data.view(fp8_dtype), scales)


def dequantize_blockwise(data: Tensor, stored: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
    """See `fp8.reference.dequantize_blockwise`."""
    if dtype not in library.DTYPES or data.dtype is not torch.float8_e4m3fn or data.numel() == 0:
        return None
    data = data.detach().contiguous()
    scales = (e8m0_to_float(stored) if stored.dtype == torch.uint8 else stored).contiguous()
    out = torch.empty(data.shape, dtype=dtype)
    sizes = (math.prod(data.shape[:-2]), *data.shape[-2:], *block)
    pointers = (data.data_ptr(), scales.data_ptr(), out.data_ptr())
    _functions["te_load_fp8"](*pointers, _wide(dtype), *sizes, torch.get_num_threads())
    return out


def quantize_nvfp4(x: Tensor, block_rows: int, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """See `nvfp4.reference.quantize_nvfp4`, to nearest; of one matrix in whole blocks."""
    if x.dim() != 2 or x.dtype not in library.DTYPES or (amax is not None and amax.dim() > 0):
        return None
    amax = largest(x) if amax is None else amax
    x = x.detach().contiguous()
    rows, columns = x.shape
    packed = torch.empty((rows, columns // 2), dtype=torch.uint8)
    scales = torch.empty((rows, columns // 16), dtype=torch.uint8)
    pointers = (packed.data_ptr(), scales.data_ptr())
    sizes = (rows, columns, block_rows, float(amax))
    failed = _functions["te_store_nvfp4"](x.data_ptr(), _wide(x.dtype), *pointers, *sizes, torch.get_num_threads())
    return None if failed else (packed, scales.view(torch.float8_e4m3fn), amax)


def decode_blocks(packed: Tensor, scales: Tensor) -> Tensor:
    """See `nvfp4.reference.decode_blocks`; whole blocks."""
    packed, scales = packed.detach().contiguous(), scales.detach().contiguous()
    out = torch.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=torch.float32)
    pointers = (packed.data_ptr(), scales.data_ptr(), out.data_ptr())
    _functions["te_load_nvfp4"](*pointers, scales.numel(), torch.get_num_threads())
    return out
