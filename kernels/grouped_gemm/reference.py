"""Grouped GEMM as a loop over groups: the definition, and what runs on CPU.

A CPU's GEMM keeps both cores busy from a few dozen rows on, and the loop makes no copies, so nothing cleverer pays.
Rows past the last group (padding at the tail) produce zeros. T rows, G groups, K in, N out.
"""

import torch
from torch import Tensor

from ..gemm import gemv
from ..gemm.cpu import in_float32
from ..gemm.float32 import float32_product, float32_products
from ..gemm.reference import accumulate_product


def split_bounds(m_splits: Tensor, rows: int) -> list[tuple[int, int]]:
    """Return each group's [begin, end) as Python integers. Raises ValueError when the splits exceed `rows`."""
    bounds, begin = [], 0
    for size in m_splits.tolist():
        if size < 0:
            raise ValueError(f"m_splits has a negative entry: {size}; each is the number of rows of one GEMM")
        bounds.append((begin, begin + size))
        begin += size
    if begin > rows:
        raise ValueError(f"m_splits add up to {begin} rows, but the input has only {rows}")
    return bounds


def check_alignment(m_splits: Tensor, align: int) -> None:
    """Raise ValueError where a split is no multiple of `align` rows."""
    for size in m_splits.tolist():
        if size % align:
            raise ValueError(f"m_splits has {size}, but groups of scaled rows are padded to a multiple of {align}")


def grouped_gemm(a: Tensor, b: Tensor, m_splits: Tensor, transpose_b: bool) -> Tensor:
    """Return each group's rows times its matrix.

    transpose_b: `a[g] @ b[g]^T`, [T, K] x [G, N, K] -> [T, N]; else `a[g] @ b[g]`, [T, N] x [G, N, K] -> [T, K].
    """
    out = a.new_empty(a.shape[0], b.shape[1] if transpose_b else b.shape[2])
    most = gemv.FEW if transpose_b and len(m_splits) == len(b) and gemv.uses_grouped_gemv(a, b) else 0
    few: list[tuple[int, int, int]] = []
    many: list[tuple[int, int, int]] = []
    end = 0
    for g, (begin, end) in enumerate(split_bounds(m_splits, a.shape[0])):
        if end > begin:
            (few if end - begin <= most else many).append((g, begin, end - begin))
    if few:
        gemv.grouped_gemv(a, b, few, out)
    if many:
        # views of all groups by three calls: with a slice for each, a dozen rows take as long to name as to multiply
        matrices = (b.transpose(1, 2) if transpose_b else b).unbind()
        if a.dtype != torch.float32 and in_float32(a):  # dequantized operands need no call
            float32_products(a, matrices, many, out)
        else:
            for g, begin, count in many:
                torch.mm(a.narrow(0, begin, count), matrices[g], out=out.narrow(0, begin, count))
    if end < out.shape[0]:
        out[end:].zero_()
    return out


def grouped_gemm_wgrad(dy: Tensor, x: Tensor, m_splits: Tensor) -> Tensor:
    """Return `dy[g]^T @ x[g]` for each group: [T,N], [T,K] -> [G,N,K]. A group without rows gives zeros."""
    out = dy.new_empty(m_splits.shape[0], dy.shape[1], x.shape[1])
    for g, (begin, end) in enumerate(split_bounds(m_splits, dy.shape[0])):
        if end > begin:
            multiply(dy[begin:end].t(), x[begin:end], out[g])
        else:
            out[g].zero_()
    return out


def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write `left @ right` to `out`, in the dtype in which this CPU multiplies."""
    if in_float32(left):
        float32_product(left, right, None, out.dtype, out)
    else:
        torch.mm(left, right, out=out)


def grouped_gemm_wgrad_accumulate(
    main_grad: Tensor, dy: Tensor, x: Tensor, m_splits: Tensor, accumulate: bool, scale: Tensor | None
) -> None:
    """Add each group's `scale[g] * dy[g]^T @ x[g]` to main_grad[g], or write it there: [T,N], [T,K] into [G,N,K].

    A group without rows is left alone when accumulating, zero when writing.
    """
    for g, (begin, end) in enumerate(split_bounds(m_splits, dy.shape[0])):
        if end > begin:
            factor = None if scale is None else scale[g]
            accumulate_product(main_grad[g], dy[begin:end].t(), x[begin:end], accumulate, factor)
        elif not accumulate:
            main_grad[g].zero_()
