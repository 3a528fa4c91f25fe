"""The three GEMMs of a grouped layer under a recipe, as functions that know nothing of autograd.

T rows sorted by group, G groups (GEMMs), K in, N out. The three GEMMs and the usage of each operand are those of
`dense_gemms`; what is new is that every group is quantized by itself: per-tensor scales are one per group, and blocks
that span rows stay inside their group (see `row_groups`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand, ScaledOperand, epilogue_scale
from te_models.kernels.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_accumulate_,
    scaled_grouped_gemm,
    scaled_grouped_gemm_wgrad,
    scaled_grouped_gemm_wgrad_accumulate_,
)

from .delayed import bind
from .dense_gemms import GemmOptions, dgrad_weight, fprop_weight, plain_weight, scaled_values, weight_side
from .given_rows import fprop_side, wgrad_side
from .grouped_tensor import GroupedRows
from .kept import note_statistics
from .quantized_module import LiveState
from .quantized_tensor import QuantizedTensor
from .quantizer import Fields, IdentityQuantizer, Quantizer, Usage
from .recipe import GemmQuantizers
from .row_groups import PaddedRows, RowGroups
from .second_derivatives import first_derivative
from .sides import AnyQuantizer, Side, both_plain, plain, quantized_gemms, side_of_fields, turned, values_side
from .stored_form import check_format, check_operands
from .wgrad import run_wgrad

MIN_ROW_ALIGNMENT = 16
"""Rows that grouped GEMMs on an accelerator want groups to begin at a multiple of, where they are contracted."""


def grouped_fprop(
    x: Tensor,
    weights: tuple[Tensor, ...],
    cached: QuantizedTensor | None,
    rows: RowGroups,
    live: LiveState,
    quantizers: GemmQuantizers,
    needs_dgrad: bool,
) -> tuple[Tensor, Fields]:
    """Return (`x[g] w[g]^T` for each group of rows, [T, N]; what `grouped_gradients` may read of the weights).

    x: [T, K] in the compute dtype, or `GroupedRows` of the input quantizer; weights: one [G, N, K] or G of [N, K],
    plain or quantized; cached: the weights quantized in an earlier micro-batch. x itself is what the gradients need: a
    plain one is padded, and quantized, for wgrad in the backward pass.
    """
    x_quantizer = bind(quantizers.input, live.scale, live.amax, "input")
    if live.statistics is not None:
        noted = live.statistics[0]
        note_statistics(noted[0], bind(quantizers.input, live.scale, None, "input"), x, rows=rows)
        if cached is None and not isinstance(weights[0], QuantizedTensor):
            note_statistics(noted[1], bind(quantizers.weight, live.scale, None, "weight"), stacked(weights))
    fields: Fields = {}
    if cached is None and not isinstance(weights[0], QuantizedTensor):
        weight, fields = fprop_weight(stacked(weights), quantizers, x.dtype, live, needs_dgrad, None)
    else:
        if isinstance(weights[0], QuantizedTensor):
            check_operands(weights[0], quantizers, needs_dgrad)
        weight = _weights_side(weights, cached, quantizers.weight, "rowwise", x.dtype, live.scale, live.amax)
    return _rows_product(x, x_quantizer, weight, "rowwise", rows, x.dtype), fields


def grouped_gradients(
    dy: Tensor,
    x: Tensor,
    weights: tuple[Tensor, ...],
    cached: QuantizedTensor | None,
    main_grad: Tensor | None,
    rows: RowGroups,
    live: LiveState,
    quantizers: GemmQuantizers,
    options: GemmOptions,
    needs: tuple[bool, bool],
    fields: Fields,
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """Return the gradients of x and of each weight of `grouped_fprop`, those that are needed and go to autograd.

    dy: [T, N]; main_grad: where the options want the weight gradient; fields: from `grouped_fprop`.
    """
    override, scale, key, dtype = quantizers.backward_override, live.scale, live.key, x.dtype
    quantizer = IdentityQuantizer()
    if not override:
        quantizer = bind(quantizers.grad_output, scale, live.grad_amax, "grad_output")
        if live.grad_statistics is not None:
            unrecorded = bind(quantizers.grad_output, scale, None, "grad_output")
            note_statistics(live.grad_statistics[0], unrecorded, dy, key, rows)
    dx = None
    if needs[0]:
        if override == "high_precision":
            weight = turned(Operand(plain_weight(stacked(weights), dtype), None), "columnwise")
        elif override == "dequantized":
            weight = plain(_weights_side(weights, cached, quantizers.weight, "rowwise", dtype, scale, None), dtype)
            weight = turned(Operand(scaled_values(weight, dtype), None), "columnwise")
        elif fields:
            weight = dgrad_weight(stacked(weights), fields, quantizers, dtype, live, None)
        else:
            weight = _weights_side(weights, cached, quantizers.weight, "columnwise", dtype, scale, None)
        dx = _rows_product(dy, quantizer, weight, "columnwise", rows, dtype, key)
    dw: tuple[Tensor | None, ...] = (None,) * len(weights)
    if needs[1]:
        x_quantizer = IdentityQuantizer() if override else bind(quantizers.input, scale, None, "input")
        if override == "dequantized":
            x = _dequantized_rows(bind(quantizers.input, scale, None, "input"), x, rows, dtype)
        left, right, splits = _wgrad_sides(dy, x, quantizer, x_quantizer, rows, dtype, key)
        wgrad, out_dtype = options.wgrad, weights[0].dtype

        def compute() -> Tensor | None:
            if main_grad is None:
                return _wgrad_product(left, right, splits, out_dtype)
            _accumulate_wgrad_(main_grad, left, right, splits, not (wgrad and wgrad.overwrite))
            return None

        grouped = first_derivative(run_wgrad(wgrad, weights[0], compute), override)
        if grouped is not None:
            dw = (grouped,) if weights[0].dim() == 3 else grouped.unbind(0)
    return first_derivative(dx, override), dw


def bias_rows_gradient(dy: Tensor, m_splits: Tensor) -> Tensor:
    """Return the gradient of a bias [G, N] from dy [T, N]: a GEMM with ones, which unlike the scatter that autograd
    would derive sums in one order everywhere."""
    return grouped_gemm_wgrad(dy, dy.new_ones(dy.shape[0], 1), m_splits).squeeze(-1)


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
    return values_side(quantizer, quantizer.rows_operand(x, usage, dtype, rows, key), usage)


def alignment(usage: Usage, device: torch.device, *quantizers: AnyQuantizer) -> int:
    """Return the multiple of rows at which groups begin in operands of these quantizers for one GEMM."""
    align = max(quantizer.row_block(usage) for quantizer in quantizers)
    return max(align, MIN_ROW_ALIGNMENT) if usage == "columnwise" and quantized_gemms(device) else align


def wgrad_alignment(quantizers: GemmQuantizers, device: torch.device) -> int:
    """Return `alignment` of wgrad's operands under a recipe that is not delayed scaling, whose blocks are one row."""
    values = [q for q in (quantizers.grad_output, quantizers.input) if isinstance(q, Quantizer)]
    return alignment("columnwise", device, *values) if values else 1


def _padding(rows: RowGroups, usage: Usage, device: torch.device, *quantizers: AnyQuantizer) -> PaddedRows | None:
    align = alignment(usage, device, *quantizers)
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
    padding = None if isinstance(x, GroupedRows) else _padding(rows, "rowwise", x.device, quantizer)
    if isinstance(x, GroupedRows):
        left, padding = fprop_side(x, rows, dtype)
        sizes = rows.m_splits if padding is None else padding.sizes
    elif padding is None:
        left, sizes = _rows_side(quantizer, x, "rowwise", dtype, rows, key), rows.m_splits
    else:
        left = _rows_side(quantizer, padding.pad(x), "rowwise", dtype, padding.groups(), key)
        sizes = padding.sizes
    if isinstance(left, ScaledOperand) and isinstance(weight, ScaledOperand):
        y = scaled_grouped_gemm(left, weight, sizes, dtype)
        return y if padding is None else padding.unpad(y)
    a, b = both_plain("scaled_grouped_gemm", left, weight, dtype)
    fprop = usage == "rowwise"
    y = grouped_gemm(a.values, b.values if fprop else b.values.mT, sizes, fprop)
    y = y if padding is None else padding.unpad(y)
    scale = epilogue_scale(a, b)
    return (y if scale is None else y.float() * rows.per_row(scale)[:, None]).to(dtype)


def stacked(weights: tuple[Tensor, ...]) -> Tensor:
    """Return the weights as one tensor [G, N, K]; quantized members are dequantized."""
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
        dy, rows = padding.pad(dy), padding.groups()
    left = _rows_side(dy_quantizer, dy, "columnwise", dtype, rows, key)
    if isinstance(x, GroupedRows):
        return left, wgrad_side(x, padding, dtype), rows.m_splits
    x = x if padding is None else padding.pad(x)
    return left, _rows_side(x_quantizer, x, "columnwise", dtype, rows), rows.m_splits


def _wgrad_product(left: Side, right: Side, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each group's `left @ right^T` over its rows, [G, N, K]."""
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        return scaled_grouped_gemm_wgrad(left, right, splits, dtype)
    a, b = both_plain("scaled_grouped_gemm_wgrad", left, right, dtype)
    dw, scale = grouped_gemm_wgrad(a.values.mT, b.values.mT, splits), epilogue_scale(a, b)
    return (dw if scale is None else dw.float() * scale[:, None, None]).to(dtype)


def _accumulate_wgrad_(main_grad: Tensor, left: Side, right: Side, splits: Tensor, accumulate: bool) -> None:
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        scaled_grouped_gemm_wgrad_accumulate_(main_grad, left, right, splits, accumulate=accumulate)
        return
    a, b = both_plain("scaled_grouped_gemm_wgrad", left, right, torch.bfloat16)
    grouped_gemm_wgrad_accumulate_(main_grad, a.values.mT, b.values.mT, splits, accumulate, epilogue_scale(a, b))
