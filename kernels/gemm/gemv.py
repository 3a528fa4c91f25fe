"""A few rows by a weight in high precision, on CPU, as one operation of eager code and of a graph.

Decoding one token, or one of each sequence, takes as long as reading the weights. A CPU's GEMM, made for many rows,
reads them at half of what memory gives, in bfloat16 at a third; these functions read them once, front to back. Where
there are more rows than FEW a GEMM is as fast, and where a gradient is wanted, or no library can be compiled, it is
what runs.
"""

import ctypes
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import cpp_library
from ..backend import Backend, Compiled, choose
from ..compiling import compiling
from ..custom_op import entry_of, like, operation, takes
from ..quantize.cpu import rounding as shared
from ..threads import threads_for
from ..torch_versions import constant_when_traced

FEW = 8
"""The most rows."""
LEAST = 2**16
"""The fewest elements of a weight: of smaller ones, calls take longer than what they compute."""
MOST_IN_GROUPS = 256
"""The most rows of all groups together: in larger calls, as training's are, every group is multiplied by a GEMM, whose
bits do not depend on how many rows a rank happens to have for an expert."""
_P, _N, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS = {
    "te_rows": (_P, _P, _P, _N, _N, _N, _P, _N, _INT),
    "te_rows_of_groups": (_P, _P, _P, _N, _N, _N, _P, _N, _N, _INT),
}


@functools.cache
def _function(dtype: torch.dtype, name: str = "te_rows", narrow: bool = False) -> Any:
    """Return a function for a dtype. narrow: with AVX2 alone."""
    defined = {"INPUT": shared.NAMES[dtype]} | ({"NARROW": ""} if narrow else {})
    return cpp_library.function("gemv.cpp", defined, name, _ARGUMENTS[name])


@constant_when_traced
def has_instructions() -> bool:
    """Whether this CPU runs the C++ of `simd.h` that multiplies."""
    return sys.platform == "linux" and torch.cpu._is_avx2_supported()


def without_instructions() -> str:
    """Say why this CPU does not run the C++ of `simd.h` that multiplies, or ""."""
    return "" if has_instructions() else "it is for x86 CPUs with AVX2, on Linux"


GEMV = Compiled(
    "a product of few rows",
    lambda dtype: _function(dtype),
    shared.DTYPES,
    against=without_instructions,
    in_graphs="if there",
)


_TAKES = takes("x: T [..., K]; weight: T [N, K] rows; bias: T [N]?", T=shared.DTYPES)
_GROUPS = takes("x: T [R, K]; weight: T [G, N, K] rows", T=shared.DTYPES)


def uses_gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `gemv_linear` multiplies x: [..., K] by weight: [N, K]: plain matrices of one dtype on CPU, few rows.
    Asked where gradients are off."""
    if torch.compiler.is_compiling() and compiling():
        few = x.device.type == "cpu" and x.dim() > 0 and statically_known_true(x.numel() <= FEW * x.shape[-1])
        if not few or not statically_known_true(weight.numel() >= LEAST) or _TAKES.misfit(x, weight, bias):
            return False
        return not _autocast_elsewhere(x) and choose(GEMV, x) is Backend.OPERATION
    if _TAKES.misfit_on_cpu(x, weight, bias) or not 0 < x.numel() <= FEW * x.shape[-1] or weight.numel() < LEAST:
        return False
    return not _autocast_elsewhere(x) and choose(GEMV, x) is Backend.COMPILED


def _autocast_elsewhere(x: Tensor) -> bool:
    """Whether a GEMM is of another dtype here."""
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != x.dtype


def _work(rows: int, elements: int, size: int) -> float:
    """Return about how many nanoseconds one thread needs: it reads 10 GB/s, and multiplies as fast by a few rows."""
    return elements * (0.1 * size + 0.05 * rows)


_ROWS = takes("x: T [M, K]; weight: T [N, K]; bias: T [N]?", T=shared.DTYPES)


@operation("gemv", lambda x, weight: like(x, (x.shape[0], weight.shape[0])), takes=_ROWS, cpu_only=True)
def _gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, weight = x.contiguous(), weight if weight.stride(1) == 1 else weight.contiguous()
    rows, inner = x.shape
    out = x.new_empty(rows, weight.shape[0])
    bias = None if bias is None else bias.contiguous()
    _function(x.dtype)(
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        weight.shape[0],
        inner,
        weight.data_ptr(),
        weight.stride(0),
        threads_for(_work(rows, weight.numel(), weight.element_size())),
    )
    return out


multiply = entry_of(_gemv).implementation
"""`gemv_linear` of x [M, K] in eager code, where `uses_gemv` has asked all that the dispatcher would."""


def gemv_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight^T + bias` in x's dtype, where it `uses_gemv`. x: [..., K]; weight: [N, K]; bias: [N] of x's
    dtype or None. Sums are float32, rounded once."""
    run = _gemv if torch.compiler.is_compiling() else multiply
    return run(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def uses_grouped_gemv(x: Tensor, weight: Tensor) -> bool:
    """Whether `grouped_gemv` multiplies rows of x: [T, K] by matrices of weight: [G, N, K], both contiguous. Called
    where nothing is traced."""
    if x.shape[0] > MOST_IN_GROUPS or _GROUPS.misfit_on_cpu(x, weight):
        return False
    return weight.shape[1] * weight.shape[2] >= LEAST and choose(GEMV, x) is Backend.COMPILED


def grouped_gemv(x: Tensor, weight: Tensor, groups: Sequence[tuple[int, int, int]], out: Tensor) -> None:
    """Write `x[first : first + count] @ weight[g]^T` to the same rows of `out` for each (g, first, count) of `groups`,
    as `gemv_linear` would. x: [T, K]; weight: [G, N, K]; out: [T, N] of x's dtype; x and out contiguous."""
    _function(x.dtype, "te_rows_of_groups")(
        x.data_ptr(),
        out.data_ptr(),
        (_N * (3 * len(groups)))(*itertools.chain.from_iterable(groups)),
        len(groups),
        weight.shape[1],
        weight.shape[2],
        weight.data_ptr(),
        weight.stride(0),
        weight.stride(1),
        threads_for(_work(1, weight[0].numel() * min(len(groups), x.shape[0]), weight.element_size())),
    )
