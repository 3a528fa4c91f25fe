"""The C++ library of each weight format and dtype of the rows."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import cpp_library
from ...backend import Compiled
from ...quantize.cpu_graph import library as shared
from ...threads import threads_for
from ..gemv import without_instructions
from ..operand import ScaledOperand

DTYPES = shared.DTYPES
_FORMATS = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2", torch.uint8: "E2M1"}
_KINDS = ("per_tensor", "float32", "pow2", "e8m0", "nvfp4")
_P, _N, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS = {
    "te_few_rows": (_P, _P, _P, _N, _N, _N, _P, _N, _P, _N, _N, _N, _N, _INT, _P, _INT),
    "te_few_rows_of_groups": (_P, _P, _P, _N, _N, _N, _P, _N, _N, _P, *(_N,) * 5, _INT, _P, _N, _INT),
}


@functools.cache
def _function(format: torch.dtype, dtype: torch.dtype, without: str = "", name: str = "te_few_rows") -> Any:
    """Return a function for a weight's stored dtype and the dtype of the rows. without: "LOOKUP" decodes where this CPU
    could look values up, "WIDE" has AVX2 alone."""
    defined = {"INPUT": shared.NAMES[dtype], "FORMAT": _FORMATS[format]}
    if format is not torch.uint8:
        defined["OF_BYTES"] = ""
    if without:
        defined[{"LOOKUP": "DECODED", "WIDE": "NARROW"}[without]] = ""
    return cpp_library.function("few_rows.cpp", defined, name, _ARGUMENTS[name])


STORED = Compiled(
    "a product with a stored weight",
    lambda format, dtype: _function(format, dtype),
    (*_FORMATS, *DTYPES),
    against=without_instructions,
)
"""Its key is the weight's stored dtype and that of the rows."""


def linear(x: Tensor, weight: ScaledOperand, bias: Tensor | None) -> Tensor:
    """Return `x @ weight^T + bias` in x's dtype, summed in float32. x: [M, K] in one of DTYPES; weight: [N, K] with
    contiguous rows; bias: [N] of x's dtype, or None."""
    x = x.contiguous()
    rows, inner = x.shape
    data, scale = weight.data, weight.scale_inv
    out = x.new_empty(rows, data.shape[0])
    if out.numel() == 0:
        return out
    block, strides = weight.block or (data.shape[0], max(inner, 1)), scale.stride() if scale.dim() == 2 else (0, 0)
    bias = None if bias is None else bias.contiguous()
    _function(data.dtype, x.dtype)(
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        data.shape[0],
        inner,
        data.data_ptr(),
        data.stride(0),
        scale.data_ptr(),
        *strides,
        *block,
        _KINDS.index(weight.kind),
        None if weight.amax is None else weight.amax.data_ptr(),
        threads_for(data.numel() * (0.3 + 0.1 * rows)),
    )
    return out


def grouped(x: Tensor, weight: ScaledOperand, groups: Sequence[tuple[int, int, int]], out: Tensor) -> None:
    """Write `x[first : first + count] @ weight[g]^T` to the same rows of `out` for each (g, first, count) of `groups`,
    as `linear` would. x: [T, K] in one of DTYPES; weight: [G, N, K]; out: [T, N] of x's dtype; x and out contiguous."""
    data, scale, amax = weight.data, weight.scale_inv, weight.amax
    block = weight.block or (weight.outer, max(weight.inner, 1))
    _function(data.dtype, x.dtype, name="te_few_rows_of_groups")(
        x.data_ptr(),
        out.data_ptr(),
        (_N * (3 * len(groups)))(*itertools.chain.from_iterable(groups)),
        len(groups),
        weight.outer,
        weight.inner,
        data.data_ptr(),
        data.stride(0),
        data.stride(1),
        scale.data_ptr(),
        0 if scale.numel() == 1 else scale.stride(0) * scale.element_size(),  # one may be of all matrices
        *(scale.stride()[1:] if scale.dim() == 3 else (0, 0)),
        *block,
        _KINDS.index(weight.kind),
        None if amax is None else amax.data_ptr(),
        0 if amax is None or amax.numel() == 1 else amax.stride(0),
        threads_for(weight.outer * weight.inner * min(len(groups), x.shape[0]) * 0.4),
    )
