"""The C++ library of each dtype of values, in the cache that the operands of a graph use, for conversions of folders.

Eagerly a quantization is a dozen passes over memory, and its largest error as many again; here both are one. A process
that quantizes little never compiles: loading a compiler's cache takes seconds.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch
from torch import Tensor

from ..cpu_graph import library as shared
from ..cpu_graph import source as rounding
from .source import FIELDS

_P, _N, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "te_quantize_blocks": (_P, _P, _P, _P, *(_N,) * 4, _INT, _FLOAT, _FLOAT, _P),
    "te_quantize_scaled": (_P, _P, _N, _FLOAT, _FLOAT, _P),
    "te_quantize_nvfp4": (_P, _P, _P, *(_N,) * 3, _FLOAT, _P),
    "te_decode_e4m3": (_P, _P, _P, *(_N,) * 3),
}
_KINDS = ("float32", "pow2", "e8m0")


def worthwhile(elements: int, dtype: torch.dtype) -> bool:
    """Whether the library computes as many values of a dtype as these: see `cpu_graph.library.worthwhile`."""
    return shared.worthwhile(elements, dtype, _trial)


def ready(x: Tensor) -> bool:
    """Whether the library quantizes x: `worthwhile`, and a contiguous matrix on CPU."""
    if x.device.type != "cpu" or x.dim() != 2 or not x.is_contiguous() or x.requires_grad:
        return False
    return worthwhile(x.numel(), x.dtype)


def _trial() -> None:
    _function("te_quantize_blocks", torch.bfloat16)


_compiling = threading.Lock()


def _function(name: str, dtype: torch.dtype) -> Any:
    with _compiling:  # threads of one conversion ask for the same one
        return _loaded(name, dtype)


@functools.cache
def _loaded(name: str, dtype: torch.dtype) -> Any:
    code = rounding.NUMBERS + rounding.FP8_SCALE + rounding.NVFP4_SCALE + FIELDS
    function = shared.compiled(
        code, {"INPUT": shared.NAMES[dtype], "RESULT": shared.NAMES[dtype]}, name, _ARGUMENTS[name]
    )
    function.restype = ctypes.c_int
    return function


def _error(bits: ctypes.c_uint32) -> float:
    return ctypes.c_float.from_buffer(bits).value


def quantize_blocks(
    x: Tensor, block: tuple[int, int], scale_kind: str, epsilon: float
) -> tuple[Tensor, Tensor, float] | None:
    """Return `fp8.reference.quantize_blockwise` of x [R, C] to E4M3, and the largest |decoded - x|; None for a NaN."""
    rows, columns = x.shape
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    grid = -(-rows // block[0]), -(-columns // block[1])
    scales = torch.empty(grid, dtype=torch.uint8 if scale_kind == "e8m0" else torch.float32)
    pointers = (scales.data_ptr(), None) if scale_kind == "e8m0" else (None, scales.data_ptr())
    error = ctypes.c_uint32()
    kind, overflow = _KINDS.index(scale_kind), torch.finfo(x.dtype).max
    sizes = (rows, columns, *block, kind, epsilon, overflow)
    run = _function("te_quantize_blocks", x.dtype)
    if run(x.data_ptr(), data.data_ptr(), *pointers, *sizes, ctypes.byref(error)):
        return None
    return data, scales, _error(error)


def quantize_scaled(x: Tensor, scale: float, inverse: float) -> tuple[Tensor, float] | None:
    """Return `fp8.reference.quantize_per_tensor` of x [R, C] to E4M3, and the largest |data * inverse - x|; None for a
    NaN."""
    data, error = torch.empty(x.shape, dtype=torch.float8_e4m3fn), ctypes.c_uint32()
    run = _function("te_quantize_scaled", x.dtype)
    if run(x.data_ptr(), data.data_ptr(), x.numel(), scale, inverse, ctypes.byref(error)):
        return None
    return data, _error(error)


def quantize_nvfp4(x: Tensor, block_rows: int, amax: float) -> tuple[Tensor, Tensor, float] | None:
    """Return packed and scales of `nvfp4.reference.quantize_nvfp4` of x [R, C], C a multiple of 16, and the largest
    |decoded - x|; None for a NaN."""
    rows, columns = x.shape
    packed = torch.empty((rows, columns // 2), dtype=torch.uint8)
    scales, error = torch.empty((rows, columns // 16), dtype=torch.float8_e4m3fn), ctypes.c_uint32()
    run = _function("te_quantize_nvfp4", x.dtype)
    sizes = rows, columns, block_rows, amax
    if run(x.data_ptr(), packed.data_ptr(), scales.data_ptr(), *sizes, ctypes.byref(error)):
        return None
    return packed, scales, _error(error)


def decode_e4m3(data: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return E4M3 [R, C] times float32 scales [R, ceil(C / width)], contiguous, the products rounded to `dtype`."""
    out = torch.empty(data.shape, dtype=dtype)
    run = _function("te_decode_e4m3", dtype)
    run(data.data_ptr(), scales.data_ptr(), out.data_ptr(), *data.shape, width)
    return out
