"""The C++ library that makes and reads stored fields, of each dtype of values: for eager layers and conversions.

Eagerly a quantization is a dozen passes over memory, and its largest error as many again; here both are one.
"""

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from ... import cpp_library, threads
from ...backend import Backend, Compiled, choose, has_library, runs_compiled
from ...custom_op import takes
from ...threads import threads_for
from ..fp8 import reference
from ..nvfp4 import cpu as nvfp4
from . import rounding as shared

_P, _N, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "te_quantize_blocks": (_P, _P, _P, _P, *(_N,) * 4, _INT, _FLOAT, _FLOAT, _P, _INT),
    "te_quantize_scaled": (_P, _P, _N, _FLOAT, _FLOAT, _P, _INT),
    "te_quantize_nvfp4": (_P, _P, _P, *(_N,) * 3, _FLOAT, _P, _INT),
    "te_decode_blocks": (_P, _P, _P, _P, *(_N,) * 4, _INT),
    "te_decode_nvfp4": (_P, _P, _P, _N, _N, _INT),
    "te_decode_e4m3": (_P, _P, _P, *(_N,) * 3),
    "te_has_nan": (_P, _N),
}
_KINDS = ("float32", "pow2", "e8m0")
_BLOCKS = takes(
    "x: T [R, C] contiguous; block: value; kind: value; block[0] > 0 and block[1] > 0; kind in KINDS; x.numel()",
    T=shared.DTYPES,
    KINDS=_KINDS,
)
_MATRIX = takes("x: T [R, C] contiguous; x.numel()", T=shared.DTYPES)
_OF_SIXTEEN = takes("x: T [R, C] contiguous; rows: value; C % 16 == 0; rows in (1, 16); x.numel()", T=shared.DTYPES)
_STORED = takes(
    "data: float8_e4m3fn [R, C]; block: value; scales: float32|uint8 [-(-R // block[0]), -(-C // block[1])];"
    "dtype: value; block[0] > 0 and block[1] > 0; dtype in T",
    T=shared.DTYPES,
)
_PACKED = takes(
    "packed: uint8 [R, P]; scales: float8_e4m3fn [R, P // 8]; dtype: value; P % 8 == 0; dtype in T", T=shared.DTYPES
)
_ROWS = takes(
    "data: float8_e4m3fn [R, C] contiguous; width: value; scales: float32 [R, -(-C // width)] contiguous;"
    "dtype: value; dtype in T",
    T=shared.DTYPES,
)


FIELDS = Compiled(
    "quantizing a matrix",
    lambda dtype: _function("te_quantize_blocks", dtype),
    shared.DTYPES,
    in_graphs="always",
)
"""Its key is the dtype of the values."""


def _load_both(dtype: torch.dtype, rounded: torch.dtype) -> None:
    FIELDS.load(dtype)
    shared.ROUND_FP8.load(dtype, rounded)


ENCODE = Compiled("quantizing a matrix and rounding it", _load_both, shared.DTYPES)
"""Its key: the dtype of the values, then the dtype of the rounded values."""


def chosen(x: Tensor, dtype: torch.dtype | None = None) -> Backend:
    """Return what quantizes a matrix x [R, C], read as it lies in memory, or decodes it to `dtype` if x is stored data.
    OPERATION: one of `op`."""
    if x.dim() != 2:
        return Backend.DEFINITION
    found = choose(FIELDS, x, dtype or x.dtype)
    return Backend.DEFINITION if found is Backend.COMPILED and not x.is_contiguous() else found


@functools.cache
def _function(name: str, dtype: torch.dtype) -> Any:
    defined = {"INPUT": shared.NAMES[dtype], "RESULT": shared.NAMES[dtype]}
    return cpp_library.function("fields.cpp", defined, name, _ARGUMENTS[name], None if "decode" in name else _INT)


Measured = tuple[Tensor, Tensor, float]


def quantize_blocks(
    x: Tensor, block: tuple[int, int], scale_kind: str, epsilon: float, *, measured: bool = True
) -> Measured | None:
    """Return `fp8.reference.quantize_blockwise` of x [R, C] to E4M3, and the largest |decoded - x|, 0 unless
    `measured`; None for a NaN, and for what the library does not take."""
    if choose(FIELDS, x) is not Backend.COMPILED or _BLOCKS.misfit_on_cpu(x, block, scale_kind):
        return None
    return _quantize_blocks(x, block, scale_kind, epsilon, measured)


def encode_blocks(
    x: Tensor,
    block: tuple[int, int] | None,
    rounded: tuple[int, int],
    scale_kind: str,
    epsilon: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Measured | None] | None:
    """Return x [R, C] as blocks of the shape `rounded` hold it in E4M3, in `dtype`, and `quantize_blocks` in blocks of
    the shape `block`, if there is one: what one GEMM multiplies, and what is stored for another. None as there."""
    if torch.compiler.is_compiling():  # where operations are asked for by themselves
        return None
    if x.requires_grad and torch.is_grad_enabled():
        return None
    found = None
    if block is None:
        if shared.IN_BLOCKS.misfit_on_cpu(x, rounded, torch.float8_e4m3fn, scale_kind):
            return None
        if not runs_compiled(shared.ROUND_FP8, x.dtype, dtype):
            return None
    else:
        if _BLOCKS.misfit_on_cpu(x, block, scale_kind) or not runs_compiled(ENCODE, x.dtype, dtype):
            return None
        found = _quantize_blocks(x, block, scale_kind, epsilon, False)
        if found is None:
            return None
    return shared.round_fp8(x, rounded, torch.float8_e4m3fn, scale_kind, dtype, epsilon), found


def _quantize_blocks(
    x: Tensor, block: tuple[int, int], scale_kind: str, epsilon: float, measured: bool
) -> Measured | None:
    rows, columns = x.shape
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cpu")
    grid = -(-rows // block[0]), -(-columns // block[1])
    scales = torch.empty(grid, dtype=torch.uint8 if scale_kind == "e8m0" else torch.float32, device="cpu")
    pointers = (scales.data_ptr(), None) if scale_kind == "e8m0" else (None, scales.data_ptr())
    kind, overflow, error = _KINDS.index(scale_kind), torch.finfo(x.dtype).max, ctypes.c_uint32()
    sizes = (rows, columns, *block, kind, epsilon, overflow)
    # conversions, which measure errors, call this from several threads of their own
    nanoseconds = 2 * x.numel()
    own = measured or nanoseconds < threads.LEAST_NS  # as `threads_for`, without the call
    measuring = (ctypes.byref(error) if measured else None, 1 if own else threads.threads_for(nanoseconds))
    if _function("te_quantize_blocks", x.dtype)(x.data_ptr(), data.data_ptr(), *pointers, *sizes, *measuring):
        return None
    return data, scales, ctypes.c_float.from_buffer(error).value


def quantize_scaled(x: Tensor, scale: float, inverse: float, *, measured: bool = True) -> tuple[Tensor, float] | None:
    """Return `fp8.reference.quantize_per_tensor` of x [R, C] to E4M3, and the largest |data * inverse - x|, 0 unless
    `measured`; None for a NaN, and for what the library does not take."""
    if _MATRIX.misfit_on_cpu(x) or not (math.isfinite(scale) and math.isfinite(inverse)):
        return None
    data, error = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cpu"), ctypes.c_uint32()
    measuring = (ctypes.byref(error), 1) if measured else (None, threads_for(2 * x.numel()))
    if _function("te_quantize_scaled", x.dtype)(x.data_ptr(), data.data_ptr(), x.numel(), scale, inverse, *measuring):
        return None
    return data, ctypes.c_float.from_buffer(error).value


def quantize_nvfp4(x: Tensor, block_rows: int, amax: float, *, measured: bool = True) -> Measured | None:
    """Return packed and scales of `nvfp4.reference.quantize_nvfp4` of x [R, C], C a multiple of 16, and the largest
    |decoded - x|, 0 unless `measured`; None for a NaN, and for what the library does not take."""
    if choose(FIELDS, x) is not Backend.COMPILED or _OF_SIXTEEN.misfit_on_cpu(x, block_rows):
        return None
    rows, columns = x.shape
    packed = torch.empty((rows, columns // 2), dtype=torch.uint8, device="cpu")
    scales, error = torch.empty((rows, columns // 16), dtype=torch.float8_e4m3fn, device="cpu"), ctypes.c_uint32()
    measuring = (ctypes.byref(error), 1) if measured else (None, threads_for(2 * x.numel()))
    run = _function("te_quantize_nvfp4", x.dtype)
    if run(x.data_ptr(), packed.data_ptr(), scales.data_ptr(), rows, columns, block_rows, amax, *measuring):
        return None
    return packed, scales, ctypes.c_float.from_buffer(error).value


def decode_fp8_blocks(data: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return `fp8.reference.dequantize_blockwise` of E4M3 [R, C] in `dtype`. scales: of `quantize_blocks`."""
    if _STORED.misfit_on_cpu(data, block, scales, dtype) or (scales.requires_grad and torch.is_grad_enabled()):
        return reference.dequantize_blockwise(data, scales, block, dtype)
    data, scales = data.contiguous(), scales.contiguous()
    out = torch.empty(data.shape, dtype=dtype, device="cpu")
    pointers = (scales.data_ptr(), None) if scales.dtype == torch.uint8 else (None, scales.data_ptr())
    run = _function("te_decode_blocks", dtype)
    run(data.data_ptr(), *pointers, out.data_ptr(), *data.shape, *block, threads_for(data.numel()))
    return out


def decode_nvfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `nvfp4.cpu.decode_blocks` in `dtype`: packed [R, C / 2] times E4M3 scales [R, C / 16] -> [R, C]."""
    if _PACKED.misfit_on_cpu(packed, scales, dtype) or (scales.requires_grad and torch.is_grad_enabled()):
        return nvfp4.decode_blocks(packed, scales, 2 * packed.shape[-1]).to(dtype)
    packed, scales = packed.contiguous(), scales.contiguous()
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    out = torch.empty((rows, columns), dtype=dtype, device="cpu")
    run = _function("te_decode_nvfp4", dtype)
    run(packed.data_ptr(), scales.data_ptr(), out.data_ptr(), rows, columns, threads_for(rows * columns))
    return out


def decode_e4m3(data: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return E4M3 [R, C] times float32 scales [R, ceil(C / width)], contiguous, the products rounded to `dtype`.
    Raises ValueError for others."""
    _ROWS.check("decode_e4m3", data, width, scales, dtype)
    out = torch.empty(data.shape, dtype=dtype, device="cpu")
    run = _function("te_decode_e4m3", dtype)
    run(data.data_ptr(), scales.data_ptr(), out.data_ptr(), *data.shape, width)
    return out


def has_nan(data: Tensor) -> bool:
    """Whether one of these bytes of E4M3, contiguous and on CPU, is NaN: seven ones below its sign."""
    if not data.is_contiguous() or not data.numel() or not has_library(FIELDS, torch.bfloat16):
        return bool((data.view(torch.uint8) & 0x7F == 0x7F).any())
    return bool(_function("te_has_nan", torch.bfloat16)(data.data_ptr(), data.numel()))
