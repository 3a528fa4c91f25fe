"""Each group's few rows by its matrix of a weight that is stored quantized, on CPU, without gradients.

Decoding multiplies a row or some by each expert that the router chose: the others are not read, and these as they are
stored (`gemm.few_rows`). A group of more rows than FEW multiplies its own matrix, dequantized, one after another.
"""

import torch
from torch import Tensor

from ..compiling import compiling
from ..custom_op import Output, direct, flatten, like, operation, takes
from ..gemm.few_rows import FEW, IntegerOperand, as_stored, dequantized_weight, differentiates, library
from ..gemm.operand import ScaledOperand
from .choice import choose_stored_grouped
from .reference import multiply, split_bounds


def _result(x: Tensor, weight: ScaledOperand | IntegerOperand) -> Output:
    return like(x, (x.shape[0], weight.outer))


_TAKES = takes(
    "x: T [R, K]; weight.data: any [G, N, _]; weight.scale_inv: any; weight.amax: float32?;"
    "m_splits: int8|int16|int32|int64|uint8 [G]; weight.inner == K; weight.fits()",
    T=(torch.bfloat16, torch.float16, torch.float32),
)


@operation("stored_grouped_gemm", _result, takes=_TAKES, cpu_only=True)
def _stored_grouped_gemm(x: Tensor, weight: ScaledOperand, m_splits: Tensor) -> Tensor:
    return _multiplied(x, weight, m_splits, FEW if as_stored(choose_stored_grouped(x, weight), x, weight) else 0)


_TAKES_INTEGERS = takes(
    "x: T [R, K]; weight.data: uint8 [G, N, _]; weight.scale_inv: any [G, N, _]; weight.zero_point: uint8 [G, N, _]?;"
    "m_splits: int8|int16|int32|int64|uint8 [G]; weight.inner == K; weight.fits()",
    T=(torch.bfloat16, torch.float16, torch.float32),
)


@operation("stored_integer_grouped_gemm", _result, takes=_TAKES_INTEGERS, cpu_only=True)
def _stored_integer_grouped_gemm(x: Tensor, weight: IntegerOperand, m_splits: Tensor) -> Tensor:
    return _multiplied(x, weight, m_splits, FEW if as_stored(choose_stored_grouped(x, weight), x, weight) else 0)


def _multiplied(x: Tensor, weight: ScaledOperand | IntegerOperand, m_splits: Tensor, most: int) -> Tensor:
    """Return the product, computed with the stored matrix for groups of at most this many rows, with dequantized values
    for the others."""
    x = x.contiguous()
    out, end = x.new_empty(x.shape[0], weight.outer), 0
    few: list[tuple[int, int, int]] = []
    for g, (begin, end) in enumerate(split_bounds(m_splits, x.shape[0])):
        if 0 < end - begin <= most:
            few.append((g, begin, end - begin))
        elif end > begin:
            multiply(x[begin:end], dequantized_weight(weight.member(g), x.dtype).t(), out[begin:end])
    if few and out.numel():
        library.few_rows_grouped(x, weight, few, out)
    out[end:].zero_()
    return out


_call, _call_integers = direct(_stored_grouped_gemm), direct(_stored_integer_grouped_gemm)


def stored_grouped_gemm(x: Tensor, weight: ScaledOperand | IntegerOperand, m_splits: Tensor) -> Tensor:
    """Return `x[g] @ weight[g]^T` of each group of rows in x's dtype, [T, N], where no gradient is wanted.

    x: [T, K], bfloat16 or float32; weight: [G, N, K]; m_splits: [G] integer. Rows past the last group are zero. Each
    value of the weight is what `dequantized_weight` to x's dtype gives, and at most one matrix is dequantized at a
    time. Sums are float32. Raises ValueError where the splits exceed the rows, or shapes do not fit.
    """
    integers = isinstance(weight, IntegerOperand)
    call = _call_integers if integers else _call
    if torch.compiler.is_compiling() and compiling():
        return call(x, *flatten(weight), m_splits)
    if (_TAKES_INTEGERS if integers else _TAKES).misfit_on_cpu(x, weight, m_splits):
        groups, inner = weight.data.shape[0], weight.inner
        if x.dim() != 2 or x.shape[1] != inner or m_splits.shape != (groups,):
            raise ValueError(
                f"x is {tuple(x.shape)} and m_splits {tuple(m_splits.shape)}; {groups} stored matrices of {inner} "
                f"columns take rows [T, {inner}] and splits [{groups}]"
            )
        return _multiplied(x, weight, m_splits, 0)
    if differentiates(x, weight.data, weight.scale_inv):
        return _multiplied(x, weight, m_splits, 0)
    return call(x, *flatten(weight), m_splits)
