"""The product of 16-bit matrices on a CPU that multiplies them in float32 (`cpu`): up-cast in pieces, rounded once.

One registered operation, opaque to the compiler: a graph that up-cast in plain sight would keep the float32 copies for
its backward pass, at twice the memory of what they are copies of. M rows, K contracted, N columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from ..custom_op import like, operation, register_gradient

FEW_ROWS = 4
"""A GEMM of fewer rows is bound by reading the right side, so that side is read as it is, without an up-cast copy."""
_PIECE = 2**24  # elements of a matrix that are in float32 together: 64 MiB, whatever the size of the vocabulary
_CACHED = 2**18  # where there are so few rows that reading the right side is what takes the time: 1 MiB
_CACHED_ROWS = 256


def float32_product(
    left: Tensor, right: Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return `left @ right + bias` in `out_dtype`: [M, K] by [K, N] -> [M, N]; bias: [N] or None. Summed in float32 and
    rounded once; at most 64 MiB of either side, and of the result, are in float32 at a time. out: where to write it."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return float32_product(left, right, bias, out_dtype, out)
    rows, inner = left.shape
    columns = right.shape[1]
    if rows < FEW_ROWS and out_dtype == left.dtype:
        found = torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
        return found if out is None else out.copy_(found)
    cached = rows <= _CACHED_ROWS
    row_step = max(_PIECE // max(inner, 1), 16)
    column_step = max((_CACHED if cached else _PIECE) // max(inner, min(rows, row_step), 1), 16)
    consecutive = cached and right.stride(1) == 1 and inner * columns > _CACHED and rows * columns <= _PIECE
    if not consecutive and (rows > row_step or columns > column_step):
        out = left.new_empty(rows, columns, dtype=out_dtype) if out is None else out
        for some in _slices(rows, row_step):
            wide = left[some].float()
            for part in _slices(columns, column_step):
                found = torch.mm(wide, right[:, part].float())
                out[some, part] = found if bias is None else found + bias[part]
        return out
    if consecutive:
        found = _sum_of_parts(left, right, max(_CACHED // columns, 16))
    else:
        found = torch.mm(left.float(), right.float())
    # not in place: selective checkpointing may have kept the product
    found = found if bias is None else found + bias
    return found.to(out_dtype) if out is None else out.copy_(found)


def _sum_of_parts(left: Tensor, right: Tensor, step: int) -> Tensor:
    """Return `left @ right` in float32, `step` rows of `right` at a time: consecutive in memory, where columns would be
    far apart."""
    first, *others = _slices(right.shape[0], step)
    found = torch.mm(left[:, first].float(), right[first].float())
    for part in others:
        found.addmm_(left[:, part].float(), right[part].float())
    return found


def _slices(length: int, step: int) -> Iterator[slice]:
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))


@operation("gemm_float32", lambda left, right, out_dtype: like(left, (left.shape[0], right.shape[1]), out_dtype))
def gemm_float32(left: Tensor, right: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`float32_product`, as one operation of a graph; differentiable."""
    return float32_product(left, right, bias, out_dtype)


@register_gradient(gemm_float32, saves=("left", "right", "bias.dtype"))
def _backward(saved: SimpleNamespace, needs: set[str], dy: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if "left" in needs:
        found["left"] = gemm_float32(dy, saved.right.t(), None, saved.left.dtype)
    if "right" in needs:
        found["right"] = gemm_float32(saved.left.t(), dy, None, saved.right.dtype)
    if "bias" in needs:
        found["bias"] = dy.sum(0, dtype=torch.float32).to(saved.bias_dtype)
    return found
