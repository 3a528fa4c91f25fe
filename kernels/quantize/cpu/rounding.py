"""The C++ library that rounds, of each format and pair of dtypes, compiled where it is first called."""

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from ... import cpp_library, threads
from ...backend import Compiled
from ...backend import fallbacks as fallbacks
from ...custom_op import takes
from ...threads import threads_for
from .. import hadamard

NAMES = {torch.bfloat16: "BFloat16", torch.float32: "Float32"}
DTYPES = tuple(NAMES)
"""The dtypes that are read and written."""
KINDS = ("float32", "pow2", "e8m0")
_SIGNS = (ctypes.c_float * hadamard.SIZE)(*(sign * 0.25 for sign in hadamard.SIGNS))


_P, _N, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "te_round_fp8": (_P, _P, *(_N,) * 5, _INT, _INT, _FLOAT, _FLOAT, _INT),
    "te_round_current": (_P, _P, _P, _N, _N, _INT, _INT, _FLOAT, _INT),
    "te_round_scaled": (_P, _P, _N, _N, _P, _N, _INT, _INT),
    "te_round_nvfp4": (_P, _P, *(_N,) * 5, _P, *(_N,) * 3, _P, _N, _INT),
    "te_global_decode": (_P, _P, _N),
    "te_row_amax": (_P, _P, _N, _N, _INT),
    "te_random_hadamard": (_P, _P, *(_N,) * 3, _P, _INT),
}
_OF_NVFP4 = ("te_round_nvfp4", "te_global_decode", "te_random_hadamard")


@functools.cache
def _function(name: str, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a function of the library for these dtypes."""
    file = "round_nvfp4.cpp" if name in _OF_NVFP4 else "round_fp8.cpp"
    return cpp_library.function(file, {"INPUT": NAMES[dtype], "RESULT": NAMES[out_dtype]}, name, _ARGUMENTS[name])


def _compiled(operation: str, name: str, *, amax: bool = False) -> Compiled:
    """Return what the backend knows of an operation, whose key is the dtype of x and, if it has a result, the result's
    dtype. amax: whether there is the amax of x with it."""

    def load(*dtypes: torch.dtype) -> None:
        _function(name, *dtypes)
        if amax:
            _function("te_row_amax", dtypes[0])

    return Compiled(operation, load, DTYPES, in_graphs="always")


IN_BLOCKS = takes(
    "x: any [..., R, C]; block: value; fp8_dtype: value; scale_kind: value; block[0] > 0 and block[1] > 0;"
    "fp8_dtype in FP8; scale_kind in KINDS",
    FP8=(torch.float8_e4m3fn, torch.float8_e5m2),
    KINDS=KINDS,
)
"""What `round_fp8` takes."""

ROUND_FP8 = _compiled("round_blockwise", "te_round_fp8")
ROUND_CURRENT = _compiled("round_current", "te_round_current")
ROUND_SCALED = _compiled("round_per_tensor", "te_round_scaled")
ROUND_NVFP4 = _compiled("round_nvfp4", "te_round_nvfp4", amax=True)
TRANSFORM = _compiled("random_hadamard", "te_random_hadamard")
ROW_AMAX = _compiled("amax", "te_row_amax")


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return how many matrices x [..., R, C] is, R and C."""
    return math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1]


def round_fp8(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, dtype: torch.dtype, epsilon: float
) -> Tensor:
    """See `fp8.rounding.round_blockwise`. x, dtype: one of DTYPES."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    if x.numel() == 0:
        return out
    overflow = torch.finfo(x.dtype).max
    scales = (fp8_dtype is torch.float8_e5m2, KINDS.index(scale_kind), epsilon, overflow)
    run = _function("te_round_fp8", x.dtype, dtype)
    sizes = math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1]
    elements = x.numel()
    count = 1 if elements < threads.LEAST_NS else threads_for(elements)  # a nanosecond each
    run(x.data_ptr(), out.data_ptr(), *sizes, *block, *scales, count)
    return out


def round_current(
    x: Tensor, fp8_dtype: torch.dtype, pow2: bool, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `fp8.rounding.round_current`. x, dtype: one of DTYPES."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    scale_inv = torch.empty(x.shape[:-2], dtype=torch.float32, device="cpu")
    matrices, rows, columns = _sizes(x)
    pointers = x.data_ptr(), out.data_ptr(), scale_inv.data_ptr()
    scales = fp8_dtype is torch.float8_e5m2, int(pow2), epsilon
    run = _function("te_round_current", x.dtype, dtype)
    run(*pointers, matrices, rows * columns, *scales, threads_for(x.numel()))
    return out, scale_inv


def round_scaled(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """See `fp8.rounding.round_per_tensor`. x, dtype: one of DTYPES; scale: float32, the same for a row of x."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    if x.numel():
        by_row = int(scale.numel() > 1)
        scale = scale.expand(*x.shape[:-1], 1).contiguous() if by_row else scale
        matrices, rows, columns = _sizes(x)
        sizes = matrices * rows, columns, scale.data_ptr(), by_row
        run = _function("te_round_scaled", x.dtype, dtype)
        run(x.data_ptr(), out.data_ptr(), *sizes, fp8_dtype is torch.float8_e5m2, threads_for(x.numel()))
    return out


def round_nvfp4(
    x: Tensor, block: tuple[int, int], amax: Tensor, dtype: torch.dtype, key: Tensor | None = None, stream: int = 0
) -> Tensor:
    """See `nvfp4.reference.round_nvfp4`. amax: [...], or broadcastable to the blocks [..., R / block[0], C / block[1]];
    key: int64 [2], seed and step. Random bits are drawn by the rows of a block, so that none are stored."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    if x.numel() == 0:
        return out
    if amax.dim() == x.dim():
        rows, columns = (-(-size // length) for size, length in zip(x.shape[-2:], block, strict=True))
        amax = amax.expand(*x.shape[:-2], rows, columns)
        amax = amax[None] if x.dim() == 2 else amax.flatten(0, -3)
        strides = amax.stride()
    else:
        amax, strides = amax.contiguous(), (1, 0, 0)
    run = _function("te_round_nvfp4", x.dtype, dtype)
    pointers = (x.data_ptr(), out.data_ptr())
    key = None if key is None else key.contiguous()
    drawing = None if key is None else key.data_ptr(), stream
    run(*pointers, *_sizes(x), *block, amax.data_ptr(), *strides, *drawing, threads_for(x.numel()))
    return out


def global_decode(amax: Tensor) -> Tensor:
    """See `nvfp4.reference.global_decode`."""
    amax = amax.contiguous()
    out = torch.empty_like(amax)
    _function("te_global_decode")(amax.data_ptr(), out.data_ptr(), amax.numel())
    return out


def amax(x: Tensor) -> Tensor:
    """See `fp8.blocks.amax`. x: one of DTYPES."""
    x = x.contiguous()
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-2], dtype=torch.float32)
    rows = torch.empty(x.shape[:-1], dtype=torch.float32, device="cpu")
    run = _function("te_row_amax", x.dtype)
    run(x.data_ptr(), rows.data_ptr(), rows.numel(), x.shape[-1], threads_for(x.numel()))
    return rows.amax(-1)


def random_hadamard(x: Tensor) -> Tensor:
    """See `hadamard.random_hadamard`, of the dimension -2. x: bfloat16."""
    x = x.contiguous()
    rows = -(-x.shape[-2] // hadamard.SIZE) * hadamard.SIZE
    out = x.new_empty((*x.shape[:-2], rows, x.shape[-1]))
    if out.numel():
        run = _function("te_random_hadamard")
        run(x.data_ptr(), out.data_ptr(), *_sizes(x), _SIGNS, threads_for(x.numel()))
    return out
