"""The product of 16-bit matrices on a CPU that multiplies them in float32 (`cpu`): up-cast in pieces, rounded once.

One registered operation, opaque to the compiler: a graph that up-cast in plain sight would keep the float32 copies for
its backward pass, at twice the memory of what they are copies of. M rows, K contracted, N columns.
"""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from ..custom_op import like, operation, register_gradient

FEW_ROWS = 4
"""A GEMM of fewer rows is bound by reading the right side, so that side is read as it is, without an up-cast copy."""
_PIECE = 2**20  # elements of a matrix that are in float32 together: 4 MiB, and a CPU's last cache holds three of them
_CACHED = 2**18  # where there are so few rows that reading the right side is what takes the time: 1 MiB
_CACHED_ROWS = 256
_SIDE = 1024  # of a square piece: casting it takes a hundredth of multiplying it


def float32_product(
    left: Tensor, right: Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return `left @ right + bias` in `out_dtype`: [M, K] by [K, N] -> [M, N]; bias: [N] or None. Summed in float32 and
    rounded once; at most 4 MiB of either side, and of the result, are in float32 at a time. out: where to write it."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return float32_product(left, right, bias, out_dtype, out)
    rows, inner = left.shape
    columns = right.shape[1]
    if rows < FEW_ROWS and out_dtype == left.dtype:
        found = torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
        return found if out is None else out.copy_(found)
    if max(rows * inner, right.numel(), rows * columns) <= _CACHED:
        found = torch.mm(left.float(), right.float())
    else:
        row_step, inner_step, column_step = _steps(rows, inner, columns, right.stride(1) == 1)
        if rows > row_step or columns > column_step:
            out = left.new_empty(rows, columns, dtype=out_dtype) if out is None else out
            for some in _slices(rows, row_step):
                wide = left[some].float() if inner <= inner_step else left[some]
                for part in _slices(columns, column_step):
                    found = _sum_of_parts(wide, right[:, part], inner_step)
                    out[some, part] = found if bias is None else found + bias[part]
            return out
        found = _sum_of_parts(left, right, inner_step)
    # not in place: selective checkpointing may have kept the product
    found = found if bias is None else found + bias
    return found.to(out_dtype) if out is None else out.copy_(found)


def float32_products(
    left: Tensor, matrices: Sequence[Tensor], groups: Sequence[tuple[int, int, int]], out: Tensor
) -> None:
    """Write `float32_product` of the rows of each group and its matrix to these rows of out: [T, K] by [K, N] each
    -> [T, N]. groups: (number of the matrix, first row, number of rows) of each."""
    most = _CACHED // max(*matrices[0].shape, 1)
    small = matrices[0].numel() <= _CACHED and not torch.is_autocast_enabled("cpu")
    for g, begin, count in groups:  # most of them without a call
        some, into = left.narrow(0, begin, count), out.narrow(0, begin, count)
        if small and FEW_ROWS <= count <= most:
            into.copy_(torch.mm(some.float(), matrices[g].float()))
        elif small and count < FEW_ROWS:
            torch.mm(some, matrices[g], out=into)
        else:
            float32_product(some, matrices[g], None, out.dtype, into)


def _steps(rows: int, inner: int, columns: int, consecutive: bool) -> tuple[int, int, int]:
    """Return how many rows, how much of the inner size, and how many columns are multiplied at a time: no piece of a
    matrix has more than _PIECE elements.

    consecutive: a row of the right side lies in one piece of memory, so that the inner size is split before columns.
    """
    limit = _CACHED if rows <= _CACHED_ROWS else _PIECE
    row_step = min(rows, _SIDE, limit)
    if consecutive:
        column_step = min(columns, _SIDE)
        inner_step = min(inner, max(limit // max(column_step, row_step), 1))
    else:
        inner_step = min(inner, _SIDE)
        column_step = min(columns, max(limit // max(inner_step, row_step), 1))
    return max(row_step, limit // max(column_step, inner_step)), inner_step, column_step


def _sum_of_parts(left: Tensor, right: Tensor, step: int) -> Tensor:
    """Return `left @ right` in float32, `step` of the inner size at a time."""
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
    if "right" in needs:  # of a weight that lies transposed, as it lies
        found["right"] = gemm_float32(dy.t(), saved.left, None, saved.right.dtype).t()
    if "bias" in needs:
        found["bias"] = dy.sum(0, dtype=torch.float32).to(saved.bias_dtype)
    return found
