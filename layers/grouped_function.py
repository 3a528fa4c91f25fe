"""One GEMM per group of rows, in high precision or under a recipe: the implementation behind GroupedLinear.

T rows sorted by group, G groups (GEMMs), K in, N out. The three GEMMs and the usage of each operand are those of
`dense_gemms`; what is new is that every group is quantized by itself: per-tensor scales are one per group, and
blocks that span rows stay inside their group (see `row_groups`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand, ScaledOperand
from te_models.kernels.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_accumulate_,
    scaled_grouped_gemm,
    scaled_grouped_gemm_wgrad,
    scaled_grouped_gemm_wgrad_accumulate_,
)

from .autocast import state
from .delayed import bind
from .dense_gemms import DEFAULT_OPTIONS, HIGH_PRECISION, GemmOptions, plain_weight, scaled_values, weight_side
from .kept import note_statistics
from .linear_function import largest
from .module import compute_dtype
from .quantized_module import QuantizedModule, check_format
from .quantized_tensor import QuantizedTensor
from .quantizer import IdentityQuantizer, Quantizer, Usage
from .recipe import GemmQuantizers
from .row_groups import PaddedRows, RowGroups
from .sides import AnyQuantizer, Side, both_plain, factor, plain, quantized_gemms, side_of_fields, turned
from .wgrad import run_wgrad

MIN_ROW_ALIGNMENT = 16
"""Rows that grouped GEMMs on an accelerator want groups to begin at a multiple of, where they are contracted."""


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
    if state().calibrating:
        module.calibrate("input", rows.amax(x))
        module.calibrate("weight", largest(_stacked(weights)))
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


def _weights_side(
    weights: tuple[Tensor, ...],
    cached: QuantizedTensor | None,
    quantizer: Quantizer,
    usage: Usage,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
) -> Side:
    """Return the weights as one side, [G, N, K] or [G, K, N], stored ones exactly as they are."""
    first = weights[0] if cached is None else cached
    if first.dim() == 3 or not isinstance(first, QuantizedTensor):
        stacked = first if first.dim() == 3 else torch.stack(weights)
        return weight_side(stacked, quantizer, usage, dtype, scale, amax)
    check_format(first, quantizer)
    names = first.quantizer.field_names()
    fields = {name: torch.stack([w.fields[name] for w in weights]) for name in names}  # type: ignore[attr-defined]
    return side_of_fields(first.quantizer, fields, usage, dtype, (len(weights), *first.shape))


def _rows_side(
    quantizer: AnyQuantizer, x: Tensor, usage: Usage, dtype: torch.dtype, rows: RowGroups, key: Tensor | None = None
) -> Side:
    """Quantize rows sorted by group, x: [T, C], as a side of a grouped GEMM."""
    if quantized_gemms(x.device):
        scaled = quantizer.scaled_rows(x, usage, rows, key)
        if scaled is not None:
            return scaled
    return turned(quantizer.rows_operand(x, usage, dtype, rows, key), usage)


def _padding(rows: RowGroups, usage: Usage, device: torch.device, *quantizers: AnyQuantizer) -> PaddedRows | None:
    align = max(quantizer.row_block(usage) for quantizer in quantizers)
    if usage == "columnwise" and quantized_gemms(device):
        align = max(align, MIN_ROW_ALIGNMENT)
    return None if align == 1 else rows.padded(align)


def _rows_product(
    x: Tensor,
    quantizer: AnyQuantizer,
    weight: Side,
    usage: Usage,
    rows: RowGroups,
    dtype: torch.dtype,
    key: Tensor | None = None,
) -> Tensor:
    """fprop and dgrad: rows times their group's matrix. usage: of the weight."""
    padding = _padding(rows, "rowwise", x.device, quantizer)
    if padding is None:
        left, sizes = _rows_side(quantizer, x, "rowwise", dtype, rows, key), rows.m_splits
    else:
        left = _rows_side(quantizer, padding.pad(x), "rowwise", dtype, padding.groups(), key)
        sizes = padding.sizes
    if isinstance(left, ScaledOperand) and isinstance(weight, ScaledOperand):
        y = scaled_grouped_gemm(left, weight, sizes, dtype)
        return y if padding is None else padding.unpad(y)
    a, b = both_plain(left, weight, dtype)
    fprop = usage == "rowwise"
    y = grouped_gemm(a.values, b.values if fprop else b.values.mT, sizes, fprop)
    y = y if padding is None else padding.unpad(y)
    scale = factor(a, b)
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
        grad_amax: Tensor | None,
        statistics: Tensor | None,
        grad_statistics: Tensor | None,
        key: Tensor | None,
        quantizers: GemmQuantizers,
        options: GemmOptions,
        *weights: Tensor,
    ) -> Tensor:
        x_quantizer = bind(quantizers.input, scale, amax, "input")
        rows = RowGroups(m_splits, ends, group)
        if statistics is not None:
            noted = statistics[0]
            note_statistics(noted[0], bind(quantizers.input, scale, None, "input"), x, rows=rows)
            if cached is None and not isinstance(weights[0], QuantizedTensor):
                note_statistics(noted[1], bind(quantizers.weight, scale, None, "weight"), _stacked(weights))
        ctx.save_for_backward(x, m_splits, ends, group, cached, scale, key, *weights)
        # not saved, as in `_Linear`
        ctx.main_grad, ctx.grad_amax, ctx.grad_statistics = main_grad, grad_amax, grad_statistics
        ctx.quantizers, ctx.options = quantizers, options
        weight = _weights_side(weights, cached, quantizers.weight, "rowwise", x.dtype, scale, amax)
        return _rows_product(x, x_quantizer, weight, "rowwise", rows, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, m_splits, ends, group, cached, scale, key, *weights = ctx.saved_tensors
        weights, quantizers, dtype, main_grad = tuple(weights), ctx.quantizers, x.dtype, ctx.main_grad
        rows = RowGroups(m_splits, ends, group)
        override = quantizers.backward_override
        quantizer = IdentityQuantizer()
        if not override:
            quantizer = bind(quantizers.grad_output, scale, ctx.grad_amax, "grad_output")
            if ctx.grad_statistics is not None:
                unrecorded = bind(quantizers.grad_output, scale, None, "grad_output")
                note_statistics(ctx.grad_statistics[0], unrecorded, dy, key, rows)
        dx = None
        if ctx.needs_input_grad[0]:
            if override == "high_precision":
                weight = turned(Operand(plain_weight(_stacked(weights), dtype), None), "columnwise")
            elif override == "dequantized":
                weight = plain(_weights_side(weights, cached, quantizers.weight, "rowwise", dtype, scale, None), dtype)
                weight = turned(Operand(scaled_values(weight, dtype), None), "columnwise")
            else:
                weight = _weights_side(weights, cached, quantizers.weight, "columnwise", dtype, scale, None)
            dx = _rows_product(dy, quantizer, weight, "columnwise", rows, dtype, key)
        dw: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[14:]):
            x_quantizer = IdentityQuantizer() if override else bind(quantizers.input, scale, None, "input")
            if override == "dequantized":
                x = _dequantized_rows(bind(quantizers.input, scale, None, "input"), x, rows, dtype)
            left, right, splits = _wgrad_sides(dy, x, quantizer, x_quantizer, rows, dtype, key)
            wgrad, out_dtype = ctx.options.wgrad, weights[0].dtype

            def compute() -> Tensor | None:
                if main_grad is None:
                    return _wgrad_product(left, right, splits, out_dtype)
                _accumulate_wgrad_(main_grad, left, right, splits, not wgrad.overwrite)
                return None

            grouped = run_wgrad(wgrad, weights[0], compute)
            if grouped is not None:
                dw = (grouped,) if weights[0].dim() == 3 else grouped.unbind(0)
        return dx, *(None,) * 13, *dw


def _stacked(weights: tuple[Tensor, ...]) -> Tensor:
    if weights[0].dim() == 3:
        return weights[0]
    return torch.stack([w.dequantize() if isinstance(w, QuantizedTensor) else w for w in weights])


def _dequantized_rows(quantizer: AnyQuantizer, x: Tensor, rows: RowGroups, dtype: torch.dtype) -> Tensor:
    """Return what fprop's quantized x stands for."""
    padding = _padding(rows, "rowwise", x.device, quantizer)
    inside = rows if padding is None else padding.groups()
    operand = quantizer.rows_operand(x if padding is None else padding.pad(x), "rowwise", dtype, inside)
    values = operand.values
    if operand.scale is not None:
        values = values.float() * inside.per_row(operand.scale)[:, None]
    return (values if padding is None else padding.unpad(values)).to(dtype)


def _wgrad_sides(
    dy: Tensor,
    x: Tensor,
    dy_quantizer: AnyQuantizer,
    x_quantizer: AnyQuantizer,
    rows: RowGroups,
    dtype: torch.dtype,
    key: Tensor | None,
) -> tuple[Side, Side, Tensor]:
    """Return dy: [P, N] and x: [P, K] as sides of wgrad, [N, P] and [K, P], and the rows per group among the P."""
    padding = _padding(rows, "columnwise", dy.device, dy_quantizer, x_quantizer)
    if padding is not None:
        dy, x, rows = padding.pad(dy), padding.pad(x), padding.groups()
    left = _rows_side(dy_quantizer, dy, "columnwise", dtype, rows, key)
    return left, _rows_side(x_quantizer, x, "columnwise", dtype, rows), rows.m_splits


def _wgrad_product(left: Side, right: Side, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each group's `left @ right^T` over its rows, [G, N, K]."""
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        return scaled_grouped_gemm_wgrad(left, right, splits, dtype)
    a, b = both_plain(left, right, dtype)
    dw, scale = grouped_gemm_wgrad(a.values.mT, b.values.mT, splits), factor(a, b)
    return (dw if scale is None else dw.float() * scale[:, None, None]).to(dtype)


def _accumulate_wgrad_(main_grad: Tensor, left: Side, right: Side, splits: Tensor, accumulate: bool) -> None:
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        scaled_grouped_gemm_wgrad_accumulate_(main_grad, left, right, splits, accumulate=accumulate)
        return
    a, b = both_plain(left, right, torch.bfloat16)
    grouped_gemm_wgrad_accumulate_(main_grad, a.values.mT, b.values.mT, splits, accumulate, factor(a, b))
