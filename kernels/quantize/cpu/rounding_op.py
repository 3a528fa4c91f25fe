"""Quantized and dequantized operands, in a CPU graph as one registered operation each.

Traced as plain torch, every operand of every GEMM is compiled by itself, and that takes several times as long as the
rest of a model. The numbers are the same, and a step takes about as long: there is little to fuse with but the reading
of x. Eagerly the same library runs. In an exported program, where a gradient is wanted, and in a process without a C++
compiler, the definitions do: see `kernels/backend`.
"""

import torch
from torch import Tensor

from ...backend import Backend, choose, has_library
from ...custom_op import Output, expands, like, operation, takes
from .. import hadamard
from ..eager import plain_on_cpu
from ..fp8 import blocks, rounding
from ..fp8 import op as fp8_op
from ..nvfp4 import cpu as nvfp4
from ..nvfp4 import op as nvfp4_op
from . import rounding as library
from .rounding import ROUND_CURRENT, ROUND_FP8, ROUND_NVFP4, ROUND_SCALED, ROW_AMAX, TRANSFORM

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MATRICES = takes("x: any [..., R, C]; fp8_dtype: value; fp8_dtype in FP8", FP8=_FP8)
_BY_ROW = takes(
    "x: any [..., R, C]; scale: float32; fp8_dtype: value; fp8_dtype in FP8;"
    "scale.numel() > 0 and expands(scale, (*x.shape[:-1], 1))",
    FP8=_FP8,
    expands=expands,
)


@operation(
    "round_blockwise",
    lambda x, dtype: like(x, dtype=dtype),
    reference=rounding.round_blockwise,
    compiled=ROUND_FP8,
    takes=library.IN_BLOCKS,
    cpu_only=True,
)
def round_blockwise(
    x: Tensor,
    block: tuple[int, int],
    fp8_dtype: torch.dtype,
    scale_kind: str,
    dtype: torch.dtype,
    *,
    epsilon: float = 0.0,
) -> Tensor:
    """Return `dequantize_blockwise` of `quantize_blockwise` in `dtype`: x [..., R, C] as its blocks hold it."""
    return library.round_fp8(x, block, fp8_dtype, scale_kind, dtype, epsilon)


@operation(
    "round_current",
    lambda x, dtype: (like(x, dtype=dtype), like(x, x.shape[:-2], torch.float32)),
    reference=rounding.round_current,
    compiled=ROUND_CURRENT,
    takes=_MATRICES,
    cpu_only=True,
)
def round_current(
    x: Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype, *, pow2: bool = False, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scale each matrix of x [..., R, C] by its own amax: return (`round_per_tensor` of it, what is left to multiply
    with, float32 [...])."""
    return library.round_current(x, fp8_dtype, pow2, epsilon, dtype)


@operation(
    "round_per_tensor",
    lambda x, dtype: like(x, dtype=dtype),
    reference=rounding.round_per_tensor,
    compiled=ROUND_SCALED,
    takes=_BY_ROW,
    cpu_only=True,
)
def round_per_tensor(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what `quantize_per_tensor` does in `dtype`: the numbers themselves, still scaled. scale: float32, one for
    all of x, or one that is the same along each of its rows, broadcastable to x [..., R, C]."""
    return library.round_scaled(x, scale, fp8_dtype, dtype)


def _rotated(x: Tensor) -> Output:
    rows = -(-x.shape[-2] // hadamard.SIZE) * hadamard.SIZE
    return like(x, (*x.shape[:-2], rows, x.shape[-1]))


def _random_hadamard_rows(x: Tensor) -> Tensor:
    return nvfp4_op.random_hadamard(x, -2)


@operation(
    "random_hadamard_rows",
    _rotated,
    reference=_random_hadamard_rows,
    compiled=TRANSFORM,
    takes=takes("x: bfloat16 [..., R, C]"),
    cpu_only=True,
)
def _transform(x: Tensor) -> Tensor:
    return library.random_hadamard(x)


def random_hadamard(x: Tensor, dim: int = -1) -> Tensor:
    """Transform groups of 16 along `dim` (-1 or -2): see `nvfp4.op.random_hadamard`."""
    if dim == -2 and x.dtype == torch.bfloat16 and x.dim() > 1:
        return _transform(x)
    return nvfp4_op.random_hadamard(x, dim)


def matrix_amax(x: Tensor) -> Tensor:
    """Return the amax of each matrix of x [..., R, C], float32 [...], outside of a graph."""
    return library.amax(x) if has_library(ROW_AMAX, x.dtype) else blocks.amax(x)


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
    if choose(ROW_AMAX, x) is Backend.OPERATION and not _RECORDED.misfit(x, recorded):
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
    if not has_library(ROUND_NVFP4, x.dtype, dtype):
        return nvfp4.round_nvfp4(x, dtype, block=block, amax=amax, key=key, stream=stream)[0]
    return library.round_nvfp4(x, block, amax, dtype, key, stream)


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
    chosen = choose(ROUND_NVFP4, x, x.dtype, dtype)
    if chosen is Backend.OPERATION:
        known: Tensor = _amax(x) if amax is None else amax
        if not _NVFP4.misfit(x, block, known, key):
            return _round_nvfp4_in_graph(x, dtype, list(block), known, key, stream), known
    elif chosen is Backend.COMPILED and x.dim() > 1:
        known = library.amax(x) if amax is None else amax
        if not _NVFP4.misfit_on_cpu(x, block, known, key) and plain_on_cpu(known):
            return library.round_nvfp4(x, block, known, dtype, key, stream), known
    return nvfp4.round_nvfp4(x, dtype, block=block, amax=amax, key=key, stream=stream)


@operation(
    "round_current_nvfp4",
    lambda x, dtype: (like(x, dtype=dtype), like(x, x.shape[:-2], torch.float32)),
    reference=nvfp4.round_current_nvfp4,
    compiled=ROUND_NVFP4,
    takes=takes("x: any [..., R, C]; block: value; key: int64 [2]?; block[0] > 0 and block[1] > 0"),
    cpu_only=True,
)
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
    amax = library.amax(x)
    return library.round_nvfp4(x, block, amax, dtype, key, stream), library.global_decode(amax)
