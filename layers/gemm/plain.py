"""Layers without a recipe, and what a calibration measures of them."""

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.compiling import compiling
from te_models.kernels.gemm import few_rows
from te_models.kernels.gemm.dense import linear as dense
from te_models.kernels.grouped_gemm import stored_grouped_gemm

from ..quantizer.delayed import update_amax_
from ..tensor.quantized_tensor import QuantizedTensor
from .product import grouped_gemm_directly, stored_for_few_rows
from .three_gemms import Weights, plain_weights


def stored_linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight^T + bias` in x's dtype; the stored numbers are multiplied where that is faster. x: [..., in];
    weight: [out, in]; bias: [out] or None."""
    traced = compiling()
    known = None if traced else weight.few_rows
    if known is not None and known[0] is weight.quantizer:
        y = known[1].multiply(x, vars(weight), bias)
        if y is not None:
            return y.view(*x.shape[:-1], y.shape[-1])
    bias = None if bias is None else bias.to(x.dtype)
    operand = stored_for_few_rows(x, weight)
    if operand is not None:
        rows = x.reshape(-1, x.shape[-1])
        if not (traced or torch.is_grad_enabled()):
            next_time = few_rows.KnownWeight.of(rows, operand, weight.fields)
            weight.few_rows = None if next_time is None else (weight.quantizer, next_time)
        return few_rows.stored_weight_linear(rows, operand, bias).view(*x.shape[:-1], weight.shape[0])
    return dense(x, weight.dequantize(x.dtype), bias)


def plain_grouped_linear(x: Tensor, weights: Weights, m_splits: Tensor) -> Tensor:
    """Return `x[g] @ weight[g]^T` for each group of rows in x's dtype; stored numbers as in `stored_linear`. x: [T,
    in]; weights: one [G, out, in] or G of [out, in]; m_splits: [G]."""
    weight = weights[0]
    if weight.dim() == 3 and isinstance(weight, QuantizedTensor):
        stored = stored_for_few_rows(x, weight)
        if stored is not None:
            return stored_grouped_gemm(x, stored, m_splits)
    elif weight.dim() == 3:
        return grouped_gemm_directly(x, weight.to(x.dtype), m_splits)
    return grouped_gemm_directly(x, plain_weights(weights, x.dtype, groups=True), m_splits)


def largest(x: Tensor) -> Tensor:
    """Return the amax of a tensor, [] for a matrix and [G] for G of them."""
    return q.amax(x.dequantize() if isinstance(x, QuantizedTensor) else x.detach())


def calibrate(x: Tensor, weight: Tensor, amaxes: tuple[Tensor, Tensor]) -> None:
    """Record the amaxes of an input [..., in] and of a weight. amaxes: where."""
    update_amax_(amaxes[0], largest(x.reshape(-1, x.shape[-1])))
    update_amax_(amaxes[1], largest(weight))
