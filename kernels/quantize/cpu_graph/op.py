"""Quantized and dequantized operands, in a CPU graph as one registered operation each.

Traced as plain torch, every operand of every GEMM is compiled by itself, which takes several times as long as the rest
of a model. The numbers are the same, and a step takes about as long: there is little to fuse with but the reading of x.
Eagerly the same library runs once a process has quantized enough for its compilation. Before that, in an exported
program, and in a process without a C++ compiler, the definitions run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...compiling import compiling
from ...custom_op import Output, Takes, expands, like, operation, takes
from ...torch_versions import exporting
from .. import hadamard
from ..eager import eager_on_cpu, plain_on_cpu
from ..fp8 import blocks, rounding
from ..fp8 import op as fp8_op
from ..nvfp4 import cpu as nvfp4
from ..nvfp4 import op as nvfp4_op
from . import library

__all__ = ["raised_amax", "random_hadamard", "round_blockwise", "round_current", "round_nvfp4", "round_per_tensor"]


F = TypeVar("F", bound=Callable)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def in_cpu_graph(x: Tensor) -> bool:
    """Whether x is traced for a graph that a CPU runs, has a dtype that is served, and needs no gradient. The gradient
    of a rounding, where one is needed, comes from the arithmetic that defines the rounding."""
    if not torch.compiler.is_compiling() or not compiling() or exporting():
        return False
    if x.device.type != "cpu" or x.dtype not in library.DTYPES:
        return False
    return not (x.requires_grad and torch.is_grad_enabled())


def _library_takes(x: Tensor) -> bool:
    """Whether the library computes with x now, outside of a graph: in a tenth of the definitions' time, after so many
    elements that its compilation is worth it."""
    return eager_on_cpu(x) and library.worthwhile(x.numel(), x.dtype)


def _library_writes(name: str, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a function of the library reads x and gives values in this dtype, here."""
    return x.dtype in library.DTYPES and dtype in library.DTYPES and library.available(None, name, x.dtype, dtype)


def _eagerly(implementation: F, definition: F, described: Takes) -> F:
    """Return the function that eager code calls: the implementation of an operation where the library takes its
    arguments, else the definition."""
    fits = described.fitting(implementation, on_cpu=True)

    @functools.wraps(definition)
    def call(x: Tensor, /, *args: Any, **keywords: Any) -> Any:
        takes_them = _library_takes(x) and fits(x, *args, **keywords)
        return (implementation if takes_them else definition)(x, *args, **keywords)

    return call  # type: ignore[return-value]


_IN_BLOCKS = takes(
    "x: any [..., R, C]; block: value; fp8_dtype: value; scale_kind: value; block[0] > 0 and block[1] > 0;"
    "fp8_dtype in FP8; scale_kind in KINDS",
    FP8=_FP8,
    KINDS=library.KINDS,
)


def _round_blockwise(
    x: Tensor,
    block: tuple[int, int],
    fp8_dtype: torch.dtype,
    scale_kind: str,
    dtype: torch.dtype,
    *,
    epsilon: float = 0.0,
) -> Tensor:
    """Return `dequantize_blockwise` of `quantize_blockwise` in `dtype`: x [..., R, C] as its blocks hold it."""
    if not _library_writes("te_round_fp8", x, dtype):
        return rounding.round_blockwise(x, block, fp8_dtype, scale_kind, dtype, epsilon=epsilon)
    return library.round_fp8(x, block, fp8_dtype, scale_kind, dtype, epsilon)


round_blockwise_eagerly = _eagerly(_round_blockwise, rounding.round_blockwise, _IN_BLOCKS)
round_blockwise = operation(
    "round_blockwise",
    lambda x, dtype: like(x, dtype=dtype),
    reference=round_blockwise_eagerly,
    serves=in_cpu_graph,
    takes=_IN_BLOCKS,
    cpu_only=True,
)(_round_blockwise)


_MATRICES = takes("x: any [..., R, C]; fp8_dtype: value; fp8_dtype in FP8", FP8=_FP8)


def _round_current(
    x: Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype, *, pow2: bool = False, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scale each matrix of x [..., R, C] by its own amax: return (`round_per_tensor` of it, what is left to multiply
    with, float32 [...])."""
    if not _library_writes("te_round_current", x, dtype):
        return rounding.round_current(x, fp8_dtype, dtype, pow2=pow2, epsilon=epsilon)
    return library.round_current(x, fp8_dtype, pow2, epsilon, dtype)


round_current = operation(
    "round_current",
    lambda x, dtype: (like(x, dtype=dtype), like(x, x.shape[:-2], torch.float32)),
    reference=_eagerly(_round_current, rounding.round_current, _MATRICES),
    serves=in_cpu_graph,
    takes=_MATRICES,
    cpu_only=True,
)(_round_current)


_BY_ROW = takes(
    "x: any [..., R, C]; scale: float32; fp8_dtype: value; fp8_dtype in FP8;"
    "scale.numel() > 0 and expands(scale, (*x.shape[:-1], 1))",
    FP8=_FP8,
    expands=expands,
)


def _round_per_tensor(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    if not _library_writes("te_round_scaled", x, dtype):
        return rounding.round_per_tensor(x, scale, fp8_dtype, dtype)
    return library.round_scaled(x, scale, fp8_dtype, dtype)


_round_per_tensor_in_graph = operation(
    "round_per_tensor", lambda x, dtype: like(x, dtype=dtype), takes=_BY_ROW, cpu_only=True
)(_round_per_tensor)


def round_per_tensor(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what `quantize_per_tensor` does in `dtype`: the numbers themselves, still scaled. scale: float32, one for
    all of x, or one that is the same along each of its rows, broadcastable to x [..., R, C]."""
    if torch.compiler.is_compiling() and in_cpu_graph(x):
        if not _BY_ROW.misfit(x, scale, fp8_dtype):
            return _round_per_tensor_in_graph(x, scale, fp8_dtype, dtype)
    elif _library_takes(x) and not _BY_ROW.misfit_on_cpu(x, scale, fp8_dtype) and plain_on_cpu(scale):
        return _round_per_tensor(x, scale, fp8_dtype, dtype)
    return rounding.round_per_tensor(x, scale, fp8_dtype, dtype)


def _rotated(x: Tensor) -> Output:
    rows = -(-x.shape[-2] // hadamard.SIZE) * hadamard.SIZE
    return like(x, (*x.shape[:-2], rows, x.shape[-1]))


@operation("random_hadamard_rows", _rotated, takes=takes("x: bfloat16 [..., R, C]"), cpu_only=True)
def _random_hadamard_rows(x: Tensor) -> Tensor:
    has_one = library.available(None, "te_random_hadamard")
    return library.random_hadamard(x) if has_one else nvfp4_op.random_hadamard(x, -2)


def random_hadamard(x: Tensor, dim: int = -1) -> Tensor:
    """Transform groups of 16 along `dim` (-1 or -2): see `nvfp4.op.random_hadamard`."""
    if dim == -2 and x.dtype == torch.bfloat16 and x.dim() > 1:
        if in_cpu_graph(x):
            return _random_hadamard_rows(x)
        if _library_takes(x) and library.available(None, "te_random_hadamard"):
            return library.random_hadamard(x)
    return nvfp4_op.random_hadamard(x, dim)


def matrix_amax(x: Tensor) -> Tensor:
    """Return the amax of each matrix of x [..., R, C], float32 [...], outside of a graph."""
    return library.amax(x) if library.available(None, "te_row_amax", x.dtype) else blocks.amax(x)


_amax = operation(
    "matrix_amax", lambda x: like(x, x.shape[:-2], torch.float32), takes=takes("x: any [..., R, C]"), cpu_only=True
)(matrix_amax)


_RECORDED = takes("x: any [*B, R, C]; recorded: float32 [*B]")


@operation("raised_amax", lambda x, recorded: like(recorded), takes=_RECORDED, cpu_only=True)
def _raised_amax(x: Tensor, recorded: Tensor) -> Tensor:
    return torch.fmax(recorded, matrix_amax(x))


def raised_amax(x: Tensor, recorded: Tensor) -> Tensor:
    """Return the amax of each matrix of x [..., R, C], float32 [...], or what was `recorded` where that is larger. NaN
    is ignored."""
    if torch.compiler.is_compiling() and in_cpu_graph(x) and not _RECORDED.misfit(x, recorded):
        return _raised_amax(x, recorded)
    return torch.fmax(recorded, fp8_op.amax(x).detach())


_NVFP4 = takes(
    "x: any [*B, R, C]; block: value; amax: float32; key: int64 [2]?; block[0] > 0 and block[1] > 0;"
    "amax.shape == x.shape[:-2] if amax.dim() != x.dim() else"
    "  expands(amax, (*B, -(-R // block[0]), -(-C // block[1])))",
    expands=expands,
)


def _round_nvfp4(
    x: Tensor, dtype: torch.dtype, block: tuple[int, int], amax: Tensor, key: Tensor | None, stream: int
) -> Tensor:
    if not _library_writes("te_round_nvfp4", x, dtype):
        return nvfp4.round_nvfp4(x, dtype, block=block, amax=amax, key=key, stream=stream)[0]
    return library.round_nvfp4(x, block, amax, dtype, None if key is None else key.contiguous(), stream)


_round_nvfp4_in_graph = operation("round_nvfp4", lambda x, dtype: like(x, dtype=dtype), takes=_NVFP4, cpu_only=True)(
    _round_nvfp4
)


def round_nvfp4(
    x: Tensor,
    dtype: torch.dtype,
    *,
    block: tuple[int, int] = (1, nvfp4.BLOCK),
    amax: Tensor | None = None,
    key: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantize and decode at once: see `nvfp4.reference.round_nvfp4`."""
    if torch.compiler.is_compiling() and in_cpu_graph(x):
        known: Tensor = _amax(x) if amax is None else amax
        if not _NVFP4.misfit(x, block, known, key):
            return _round_nvfp4_in_graph(x, dtype, list(block), known, key, stream), known
    elif _library_takes(x) and x.dim() > 1:
        known = matrix_amax(x) if amax is None else amax
        if not _NVFP4.misfit_on_cpu(x, block, known, key) and plain_on_cpu(known):
            return _round_nvfp4(x, dtype, block, known, key, stream), known
    return nvfp4.round_nvfp4(x, dtype, block=block, amax=amax, key=key, stream=stream)


_OWN_NVFP4 = takes("x: any [..., R, C]; block: value; key: int64 [2]?; block[0] > 0 and block[1] > 0")


def _round_current_nvfp4(
    x: Tensor, dtype: torch.dtype, block: tuple[int, int], key: Tensor | None, stream: int
) -> tuple[Tensor, Tensor]:
    if not _library_writes("te_round_nvfp4", x, dtype) or not library.available(None, "te_global_decode"):
        return nvfp4.round_current_nvfp4(x, dtype, block=block, key=key, stream=stream)
    amax = matrix_amax(x)
    return _round_nvfp4(x, dtype, block, amax, key, stream), library.global_decode(amax)


_round_current_nvfp4_in_graph = operation(
    "round_current_nvfp4",
    lambda x, dtype: (like(x, dtype=dtype), like(x, x.shape[:-2], torch.float32)),
    takes=_OWN_NVFP4,
    cpu_only=True,
)(_round_current_nvfp4)


def round_current_nvfp4(
    x: Tensor,
    dtype: torch.dtype,
    *,
    block: tuple[int, int] = (1, nvfp4.BLOCK),
    key: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Scale each matrix of x [..., R, C] by its own amax: return (`round_nvfp4` of it, what is left to multiply with,
    float32 [...])."""
    if torch.compiler.is_compiling() and in_cpu_graph(x):
        if not _OWN_NVFP4.misfit(x, block, key):
            return _round_current_nvfp4_in_graph(x, dtype, list(block), key, stream)
    elif _library_takes(x) and not _OWN_NVFP4.misfit_on_cpu(x, block, key):
        return _round_current_nvfp4(x, dtype, block, key, stream)
    return nvfp4.round_current_nvfp4(x, dtype, block=block, key=key, stream=stream)
