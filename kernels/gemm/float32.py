"""The product of 16-bit matrices on a CPU that multiplies them in float32 (`cpu`): up-cast in pieces, rounded once.

One registered operation, opaque to the compiler: a graph that up-cast in plain sight would keep the float32 copies for
its backward pass, at twice the memory of what they are copies of. M rows, K contracted, N columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from ..custom_op import gradient_of, like, operation

_PIECE = 2**24  # elements of a side that are up-cast together: 64 MiB, whatever the size of the vocabulary
_CACHED = 2**18  # where there are so few rows that reading the right side is what takes the time: 1 MiB
_CACHED_ROWS = 256


def product(left: Tensor, right: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Return `left @ right + bias` in `out_dtype`: [M, K] by [K, N] -> [M, N]; bias: [N] or None. Summed in float32 and
    rounded once; at most 64 MiB of either side are up-cast at a time."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return product(left, right, bias, out_dtype)
    rows, inner = left.shape
    columns = right.shape[1]
    elements = _CACHED if rows <= _CACHED_ROWS else _PIECE
    if rows * inner <= _PIECE and columns * inner <= elements:
        found = torch.mm(left.float(), right.float())
        if bias is not None:
            found += bias
        return found.to(out_dtype)
    out = left.new_empty(rows, columns, dtype=out_dtype)
    for some in _pieces(rows, inner, _PIECE):
        wide = left[some].float()
        for part in _pieces(columns, inner, elements):
            found = torch.mm(wide, right[:, part].float())
            if bias is not None:
                found += bias[part]
            out[some, part] = found
    return out


def _pieces(length: int, inner: int, elements: int) -> Iterator[slice]:
    """Yield slices of a dimension, so long that `inner` of each are about `elements`."""
    step = max(elements // max(inner, 1), 64)
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))


@operation("gemm_float32", lambda left, right, out_dtype: like(left, (left.shape[0], right.shape[1]), out_dtype))
def gemm_float32(left: Tensor, right: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`product`, as one operation of a graph; differentiable."""
    return product(left, right, bias, out_dtype)


@gradient_of(gemm_float32, saves=("left", "right", "bias.dtype"))
def _backward(saved: SimpleNamespace, needs: set[str], dy: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if "left" in needs:
        found["left"] = gemm_float32(dy, saved.right.t(), None, saved.left.dtype)
    if "right" in needs:
        found["right"] = gemm_float32(saved.left.t(), dy, None, saved.right.dtype)
    if "bias" in needs:
        found["bias"] = dy.sum(0, dtype=torch.float32).to(saved.bias_dtype)
    return found
