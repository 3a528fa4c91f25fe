"""The C++ library of each weight format and dtype of the rows."""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import cpp_library
from ...backend import Compiled
from ...quantize.cpu import rounding as shared
from ...threads import threads_for
from ..gemv import without_instructions
from ..operand import ScaledOperand
from .integers import SCALE_DTYPES, IntegerOperand

DTYPES = shared.DTYPES
_FORMATS = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2", torch.uint8: "E2M1"}
_INTEGERS = ("INT4", "INT8")
_KINDS = ("per_tensor", "float32", "pow2", "e8m0", "nvfp4")
Format = torch.dtype | str
"""A weight's stored dtype, or one of _INTEGERS."""
_P, _N, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS = {
    "te_few_rows": (_P, _P, _P, _N, _N, _N, _P, _N, _P, _N, _N, _N, _N, _INT, _P, _INT),
    "te_few_rows_of_groups": (_P, _P, _P, _N, _N, _N, _P, _N, _N, _P, *(_N,) * 5, _INT, _P, _N, _INT),
}


@functools.cache
def _function(format: Format, dtype: torch.dtype, without: str = "", name: str = "te_few_rows") -> Any:
    """Return a function for a weight's format and the dtype of the rows. without: "LOOKUP" decodes where this CPU could
    look values up, "WIDE" has AVX2 alone."""
    defined = {"INPUT": shared.NAMES[dtype], "FORMAT": format if isinstance(format, str) else _FORMATS[format]}
    if format is not torch.uint8:
        defined["OF_INTEGERS" if isinstance(format, str) else "OF_BYTES"] = ""
    if without:
        defined[{"LOOKUP": "DECODED", "WIDE": "NARROW"}[without]] = ""
    return cpp_library.function("few_rows.cpp", defined, name, _ARGUMENTS[name])


STORED = Compiled(
    "a product with a stored weight",
    lambda format, dtype: _function(format, dtype),
    (*_FORMATS, *_INTEGERS, *DTYPES),
    against=without_instructions,
)
"""Its key is the weight's format and the dtype of the rows."""


def library_format(weight: ScaledOperand | IntegerOperand) -> Format:
    """Return what a library is compiled for."""
    return f"INT{weight.bits}" if isinstance(weight, IntegerOperand) else weight.data.dtype


class _Fields(NamedTuple):
    """What a library takes of a weight. whole: a matrix's own numbers beside its scales."""

    block: tuple[int, int]
    kind: int
    whole: Tensor | None


def _fields(weight: ScaledOperand | IntegerOperand) -> _Fields:
    inner = max(weight.inner, 1)
    if isinstance(weight, IntegerOperand):
        return _Fields((1, min(weight.group, inner)), SCALE_DTYPES.index(weight.scale_inv.dtype), weight.zero_point)
    return _Fields(weight.block or (weight.outer, inner), _KINDS.index(weight.kind), weight.amax)


class StoredLayout(NamedTuple):
    """What a library's function takes of a weight [N, K] beside its addresses, for rows of one dtype."""

    form: Format
    dtype: torch.dtype
    outer: int
    inner: int
    stride: int
    scales: tuple[int, ...]
    """Strides of the scales, rows and columns of a block, and the kind of the scales."""
    elements: int


def stored_layout(weight: ScaledOperand | IntegerOperand, dtype: torch.dtype) -> StoredLayout:
    """Return how a weight lies in memory. dtype: of the rows, one of DTYPES."""
    data, scale, fields = weight.data, weight.scale_inv, _fields(weight)
    strides = scale.stride() if scale.dim() == 2 else (0, 0)
    scales = (*strides, *fields.block, fields.kind)
    return StoredLayout(
        library_format(weight), dtype, data.shape[0], weight.inner, data.stride(0), scales, data.numel()
    )


def few_rows_linear(x: Tensor, weight: ScaledOperand | IntegerOperand, bias: Tensor | None) -> Tensor:
    """Return `x @ weight^T + bias` in x's dtype, summed in float32. x: [M, K] in one of DTYPES; weight: [N, K] with
    contiguous rows; bias: [N] of x's dtype, or None."""
    return multiply_stored(
        stored_layout(weight, x.dtype), x, weight.data, weight.scale_inv, _fields(weight).whole, bias
    )


def multiply_stored(
    layout: StoredLayout, x: Tensor, data: Tensor, scale_inv: Tensor, whole: Tensor | None, bias: Tensor | None
) -> Tensor:
    """As `few_rows_linear`, by the tensors of a weight of this layout. whole: an amax, or zero points."""
    x = x.contiguous()
    rows = x.shape[0]
    out = x.new_empty(rows, layout.outer)
    if out.numel() == 0:
        return out
    bias = None if bias is None else bias.contiguous()
    _function(layout.form, layout.dtype)(
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        layout.outer,
        layout.inner,
        data.data_ptr(),
        layout.stride,
        scale_inv.data_ptr(),
        *layout.scales,
        None if whole is None else whole.data_ptr(),
        threads_for(layout.elements * (0.3 + 0.1 * rows)),
    )
    return out


def few_rows_grouped(
    x: Tensor, weight: ScaledOperand | IntegerOperand, groups: Sequence[tuple[int, int, int]], out: Tensor
) -> None:
    """Write `x[first : first + count] @ weight[g]^T` to the same rows of `out` for each (g, first, count) of `groups`,
    as `few_rows_linear` would. x: [T, K] in one of DTYPES; weight: [G, N, K]; out: [T, N] of x's dtype; x and out
    contiguous."""
    data, scale, fields = weight.data, weight.scale_inv, _fields(weight)
    whole = fields.whole
    _function(library_format(weight), x.dtype, name="te_few_rows_of_groups")(
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
        *fields.block,
        fields.kind,
        None if whole is None else whole.data_ptr(),
        0 if whole is None or whole.numel() == 1 else whole.stride(0) * whole.element_size(),
        threads_for(weight.outer * weight.inner * min(len(groups), x.shape[0]) * 0.4),
    )
