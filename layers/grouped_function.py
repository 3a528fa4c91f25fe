"""One GEMM per group of rows, in high precision or under a recipe: the implementation behind GroupedLinear.

T rows sorted by group, G groups (GEMMs), K in, N out. The three GEMMs and the usage of each operand are those of
`linear_function`; what is new is that every group is quantized by itself: per-tensor scales are one per group, and
blocks that span rows stay inside their group (see `row_groups`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand
from te_models.kernels.grouped_gemm import grouped_gemm, grouped_gemm_wgrad, grouped_gemm_wgrad_accumulate_

from .delayed import bind
from .kept import AnyQuantizer, note_statistics
from .linear_function import DEFAULT_OPTIONS, HIGH_PRECISION, GemmOptions, factor, plain_weight
from .module import compute_dtype
from .quantized_module import QuantizedModule, check_format
from .quantized_tensor import QuantizedTensor
from .quantizer import IdentityQuantizer, Quantizer, Usage
from .recipe import GemmQuantizers
from .row_groups import PaddedRows, RowGroups
from .wgrad import run_wgrad


def grouped_linear(
    module: QuantizedModule,
    x: Tensor,
    weights: tuple[Tensor, ...],
    bias: Tensor | None,
    m_splits: Tensor,
    *,
    cached: QuantizedTensor | None = None,
    options: GemmOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Return `x[g] @ weight[g]^T + bias[g]` for each group of rows, under the recipe in force.

    module: whose quantizers and live state serve. x: [T, K]; weights: one [G, N, K] tensor, or G of [N, K]; bias:
    [G, N] or None; m_splits: [G] integer; cached: the weights quantized in an earlier micro-batch, [G, N, K]. Rows past
    the last group are zero.
    """
    dtype = compute_dtype(x)
    x = x.to(dtype)
    quantizers = module.quantizers()
    rows = RowGroups.of(m_splits, x.shape[0])
    if quantizers is None and options.wgrad is None:
        plain = [plain_weight(w, dtype) for w in weights]
        y = grouped_gemm(x, plain[0] if plain[0].dim() == 3 else torch.stack(plain), m_splits)
    else:
        quantizers = quantizers or HIGH_PRECISION
        live = module.live_state(quantizers)
        main_grad = None if options.wgrad is None else options.wgrad.main_grad
        y = _GroupedLinear.apply(x, *rows.tensors(), cached, main_grad, *live, quantizers, options, *weights)
    return y if bias is None else y + _BiasRows.apply(bias.to(dtype), *rows.tensors())


class _BiasRows(torch.autograd.Function):
    """bias: [G, N] -> [T, N], each row its group's. The gradient is a GEMM with ones: unlike the scatter that autograd
    would derive, it sums in one order everywhere."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, m_splits: Tensor, ends: Tensor, group: Tensor) -> Tensor:
        ctx.save_for_backward(m_splits)
        return RowGroups(m_splits, ends, group).per_row(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (m_splits,) = ctx.saved_tensors
        return grouped_gemm_wgrad(dy, dy.new_ones(dy.shape[0], 1), m_splits).squeeze(-1), None, None, None


def _weights_operand(
    weights: tuple[Tensor, ...],
    cached: QuantizedTensor | None,
    quantizer: Quantizer,
    usage: Usage,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
) -> Operand:
    """Return the weights as one operand [G, N, K] with scale [G] or None, stored ones exactly as they are."""
    first = weights[0] if cached is None else cached
    if not isinstance(first, QuantizedTensor):
        stacked = first if first.dim() == 3 else torch.stack(weights)
        return bind(quantizer, scale, amax, "weight").operand(stacked, usage, dtype)
    check_format(first, quantizer)
    if first.dim() == 3:
        return first.operand(usage, dtype)
    names = first.quantizer.field_names()
    fields = {name: torch.stack([w.fields[name] for w in weights]) for name in names}  # type: ignore[attr-defined]
    return first.quantizer.operand_of_fields(fields, usage, dtype, (len(weights), *first.shape))


def _padding(rows: RowGroups, usage: Usage, *quantizers: AnyQuantizer) -> PaddedRows | None:
    align = max(quantizer.row_block(usage) for quantizer in quantizers)
    return None if align == 1 else rows.padded(align)


def _forward_gemm(
    x: Tensor,
    quantizer: AnyQuantizer,
    weight: Operand,
    transpose: bool,
    rows: RowGroups,
    dtype: torch.dtype,
    key: Tensor | None = None,
) -> Tensor:
    """fprop (transpose) and dgrad: rows times their group's matrix."""
    padding = _padding(rows, "rowwise", quantizer)
    if padding is None:
        left, sizes = quantizer.rows_operand(x, "rowwise", dtype, rows, key), rows.m_splits
    else:
        left, sizes = quantizer.rows_operand(padding.pad(x), "rowwise", dtype, padding.groups(), key), padding.sizes
    y = grouped_gemm(left.values, weight.values, sizes, transpose)
    y = y if padding is None else padding.unpad(y)
    scale = factor(left, weight)
    return (y if scale is None else y.float() * rows.per_row(scale)[:, None]).to(dtype)


class _GroupedLinear(torch.autograd.Function):
    """x: [T, K] in the compute dtype; m_splits, ends, group: of RowGroups; weights: one [G, N, K] or G of [N, K], plain
    or quantized. x is kept as it is: its copy for wgrad is padded, and quantized, in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        m_splits: Tensor,
        ends: Tensor,
        group: Tensor,
        cached: QuantizedTensor | None,
        main_grad: Tensor | None,
        scale: Tensor | None,
        amax: Tensor | None,
        statistics: Tensor | None,
        key: Tensor | None,
        quantizers: GemmQuantizers,
        options: GemmOptions,
        *weights: Tensor,
    ) -> Tensor:
        x_quantizer = bind(quantizers.input, scale, amax, "input")
        rows = RowGroups(m_splits, ends, group)
        if statistics is not None:
            note_statistics(statistics, "input", bind(quantizers.input, scale, None, "input"), x, rows=rows)
            if cached is None and not isinstance(weights[0], QuantizedTensor):
                note_statistics(statistics, "weight", bind(quantizers.weight, scale, None, "weight"), _stacked(weights))
        ctx.save_for_backward(x, m_splits, ends, group, cached, main_grad, scale, amax, statistics, key, *weights)
        ctx.quantizers, ctx.options = quantizers, options
        weight = _weights_operand(weights, cached, quantizers.weight, "rowwise", x.dtype, scale, amax)
        return _forward_gemm(x, x_quantizer, weight, True, rows, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, m_splits, ends, group, cached, main_grad, scale, amax, statistics, key, *weights = ctx.saved_tensors
        weights, quantizers, dtype = tuple(weights), ctx.quantizers, x.dtype
        rows = RowGroups(m_splits, ends, group)
        override = quantizers.backward_override
        quantizer = IdentityQuantizer() if override else bind(quantizers.grad_output, scale, amax, "grad_output")
        if statistics is not None and not override:
            live = bind(quantizers.grad_output, scale, None, "grad_output")
            note_statistics(statistics, "grad_output", live, dy, key, rows)
        dx = None
        if ctx.needs_input_grad[0]:
            if override == "high_precision":
                weight = Operand(plain_weight(_stacked(weights), dtype), None)
            elif override == "dequantized":
                weight = _weights_operand(weights, cached, quantizers.weight, "rowwise", dtype, scale, None)
                weight = Operand(_dequantized(weight, dtype), None)
            else:
                weight = _weights_operand(weights, cached, quantizers.weight, "columnwise", dtype, scale, None)
            dx = _forward_gemm(dy, quantizer, weight, False, rows, dtype, key)
        dw: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[12:]):
            x_quantizer = IdentityQuantizer() if override else bind(quantizers.input, scale, None, "input")
            if override == "dequantized":
                x = _dequantized_rows(bind(quantizers.input, scale, None, "input"), x, rows, dtype)
            left, right, splits = _wgrad_operands(dy, x, quantizer, x_quantizer, rows, dtype, key)
            wgrad, out_dtype = ctx.options.wgrad, weights[0].dtype

            def compute() -> Tensor | None:
                scale = factor(left, right)
                if main_grad is None:
                    dw = grouped_gemm_wgrad(left.values, right.values, splits)
                    return (dw if scale is None else dw.float() * scale[:, None, None]).to(out_dtype)
                add = not wgrad.overwrite
                grouped_gemm_wgrad_accumulate_(main_grad, left.values, right.values, splits, add, scale)
                return None

            grouped = run_wgrad(wgrad, weights[0], compute)
            if grouped is not None:
                dw = (grouped,) if weights[0].dim() == 3 else grouped.unbind(0)
        if key is not None:
            key[1].add_(1)
        return dx, *(None,) * 11, *dw


def _stacked(weights: tuple[Tensor, ...]) -> Tensor:
    if weights[0].dim() == 3:
        return weights[0]
    return torch.stack([w.dequantize() if isinstance(w, QuantizedTensor) else w for w in weights])


def _dequantized(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return a weight operand's values [G, N, K], its scale [G] applied."""
    if operand.scale is None:
        return operand.values.to(dtype)
    return (operand.values.float() * operand.scale[:, None, None]).to(dtype)


def _dequantized_rows(quantizer: AnyQuantizer, x: Tensor, rows: RowGroups, dtype: torch.dtype) -> Tensor:
    """Return what fprop's quantized x stands for."""
    padding = _padding(rows, "rowwise", quantizer)
    inside = rows if padding is None else padding.groups()
    operand = quantizer.rows_operand(x if padding is None else padding.pad(x), "rowwise", dtype, inside)
    values = operand.values
    if operand.scale is not None:
        values = values.float() * inside.per_row(operand.scale)[:, None]
    return (values if padding is None else padding.unpad(values)).to(dtype)


def _wgrad_operands(
    dy: Tensor,
    x: Tensor,
    dy_quantizer: AnyQuantizer,
    x_quantizer: AnyQuantizer,
    rows: RowGroups,
    dtype: torch.dtype,
    key: Tensor | None,
) -> tuple[Operand, Operand, Tensor]:
    """Return dy: [P, N] and x: [P, K] as operands of wgrad, and the rows per group among the P."""
    padding = _padding(rows, "columnwise", dy_quantizer, x_quantizer)
    if padding is not None:
        dy, x, rows = padding.pad(dy), padding.pad(x), padding.groups()
    left = dy_quantizer.rows_operand(dy, "columnwise", dtype, rows, key)
    return left, x_quantizer.rows_operand(x, "columnwise", dtype, rows), rows.m_splits
