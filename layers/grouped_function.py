"""One GEMM per group of rows, in high precision or under a recipe: the implementation behind GroupedLinear.

T rows sorted by group, G groups (GEMMs), K in, N out. The three GEMMs and the usage of each operand are those of
`linear_function`; what is new is that every group is quantized by itself: per-tensor scales are one per group, and
blocks that span rows stay inside their group (see `row_groups`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand
from te_models.kernels.grouped_gemm import grouped_gemm, grouped_gemm_wgrad

from .autocast import current_recipe
from .linear_function import check_format
from .module import compute_dtype
from .quantized_tensor import QuantizedTensor
from .quantizer import Float8CurrentScalingQuantizer, Quantizer, Usage
from .recipe import Recipe
from .row_groups import PaddedRows, RowGroups


def grouped_linear(x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None, m_splits: Tensor) -> Tensor:
    """Return `x[g] @ weight[g]^T + bias[g]` for each group of rows, under the recipe in force.

    x: [T, K]; weights: one [G, N, K] tensor, or G of [N, K]; bias: [G, N] or None; m_splits: [G] integer. Rows past
    the last group are zero.
    """
    dtype = compute_dtype(x)
    x = x.to(dtype)
    recipe = current_recipe()
    if recipe is None:
        plain = [w.dequantize(dtype) if isinstance(w, QuantizedTensor) else w.to(dtype) for w in weights]
        y = grouped_gemm(x, plain[0] if plain[0].dim() == 3 else torch.stack(plain), m_splits)
    else:
        y = _QuantizedGroupedLinear.apply(x, m_splits, recipe, *weights)
    return y if bias is None else y + _BiasRows.apply(bias.to(dtype), m_splits, x.shape[0])


class _BiasRows(torch.autograd.Function):
    """bias: [G, N] -> [T, N], each row its group's. The gradient is a GEMM with ones: unlike the scatter that autograd
    would derive, it sums in one order everywhere."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, m_splits: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(m_splits)
        return RowGroups.of(m_splits, rows).per_row(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (m_splits,) = ctx.saved_tensors
        return grouped_gemm_wgrad(dy, dy.new_ones(dy.shape[0], 1), m_splits).squeeze(-1), None, None


def _rows_operand(quantizer: Quantizer, x: Tensor, usage: Usage, rows: RowGroups, dtype: torch.dtype) -> Operand:
    """Quantize grouped rows for one GEMM; the scale left for the epilogue is one per group, [G]."""
    if not isinstance(quantizer, Float8CurrentScalingQuantizer):
        return quantizer.operand(x, usage, dtype)
    scale = quantizer.scale(rows.amax(x))
    data = q.quantize_per_tensor(x, rows.per_row(scale)[:, None], quantizer.fp8_dtype)
    return Operand(data.float().to(quantizer.gemm_dtype(dtype)), torch.div(torch.ones_like(scale), scale))


def _weights_operand(weights: tuple[Tensor, ...], recipe: Recipe, usage: Usage, dtype: torch.dtype) -> Operand:
    """Return the weights as one operand [G, N, K] with scale [G] or None, stored ones exactly as they are."""
    quantizer, first = recipe.weight_quantizer(), weights[0]
    if not isinstance(first, QuantizedTensor):
        return quantizer.operand(first if first.dim() == 3 else torch.stack(weights), usage, dtype)
    check_format(first, recipe)
    if first.dim() == 3:
        return first.operand(usage, dtype)
    names = first.quantizer.field_names()
    fields = {name: torch.stack([w.fields[name] for w in weights]) for name in names}  # type: ignore[attr-defined]
    return first.quantizer.operand_of_fields(fields, usage, dtype)


def _factor(left: Operand, right: Operand) -> Tensor | None:
    if left.scale is None or right.scale is None:
        return left.scale if right.scale is None else right.scale
    return left.scale * right.scale


def _padding(rows: RowGroups, usage: Usage, *quantizers: Quantizer) -> PaddedRows | None:
    align = max(quantizer.row_block(usage) for quantizer in quantizers)
    return None if align == 1 else rows.padded(align)


def _forward_gemm(
    x: Tensor, quantizer: Quantizer, weight: Operand, transpose: bool, rows: RowGroups, dtype: torch.dtype
) -> Tensor:
    """fprop (transpose) and dgrad: rows times their group's matrix."""
    padding = _padding(rows, "rowwise", quantizer)
    left = _rows_operand(quantizer, x if padding is None else padding.pad(x), "rowwise", rows, dtype)
    sizes = rows.m_splits if padding is None else padding.sizes
    y = grouped_gemm(left.values, weight.values, sizes, transpose)
    y = y if padding is None else padding.unpad(y)
    factor = _factor(left, weight)
    return (y if factor is None else y.float() * rows.per_row(factor)[:, None]).to(dtype)


class _QuantizedGroupedLinear(torch.autograd.Function):
    """x: [T, K] in the compute dtype; m_splits: [G]; weights: one [G, N, K] or G of [N, K], plain or quantized."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, m_splits: Tensor, recipe: Recipe, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, m_splits, *weights)
        ctx.recipe = recipe
        weight = _weights_operand(weights, recipe, "rowwise", x.dtype)
        return _forward_gemm(x, recipe.input_quantizer(), weight, True, RowGroups.of(m_splits, x.shape[0]), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, m_splits, *weights = ctx.saved_tensors
        recipe, dtype, rows = ctx.recipe, x.dtype, RowGroups.of(m_splits, x.shape[0])
        dx = None
        if ctx.needs_input_grad[0]:
            weight = _weights_operand(tuple(weights), recipe, "columnwise", dtype)
            dx = _forward_gemm(dy, recipe.grad_output_quantizer(), weight, False, rows, dtype)
        dw: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[3:]):
            grouped = _weight_gradient(dy, x, recipe, rows, dtype).to(weights[0].dtype)
            dw = (grouped,) if weights[0].dim() == 3 else grouped.unbind(0)
        return dx, None, None, *dw


def _weight_gradient(dy: Tensor, x: Tensor, recipe: Recipe, rows: RowGroups, dtype: torch.dtype) -> Tensor:
    """wgrad: dy[g]^T @ x[g], [G, N, K]; zeros for an empty group."""
    dy_quantizer, x_quantizer = recipe.grad_output_quantizer(), recipe.input_quantizer()
    padding = _padding(rows, "columnwise", dy_quantizer, x_quantizer)
    if padding is not None:
        dy, x = padding.pad(dy), padding.pad(x)
    left = _rows_operand(dy_quantizer, dy, "columnwise", rows, dtype)
    right = _rows_operand(x_quantizer, x, "columnwise", rows, dtype)
    sizes = rows.m_splits if padding is None else padding.sizes
    dw = grouped_gemm_wgrad(left.values, right.values, sizes)
    factor = _factor(left, right)
    return dw if factor is None else dw.float() * factor[:, None, None]
