"""The three GEMMs of a grouped layer under a recipe, as functions that know nothing of autograd.

T rows sorted by group, G groups (GEMMs), K in, N out. The three GEMMs and the usage of each operand are those of
`dense_gemms`; what is new is that every group is quantized by itself: per-tensor scales are one per group, and blocks
that span rows stay inside their group (see `rows_sides`).
"""

from __future__ import annotations

from dataclasses import replace

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
from te_models.kernels.without_autocast import without_autocast

from ..module.base import LiveState
from ..quantizer import Fields, IdentityQuantizer, Quantizer, Usage
from ..quantizer.delayed import bind, bind_gradient
from ..quantizer.group_offsets import RowGroups
from ..recipe.base import HIGH_PRECISION, GemmQuantizers
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedStorage
from .dense_gemms import (
    USAGES,
    GemmOptions,
    dgrad_weight,
    fprop_weight,
    plain_weight,
    scaled_values,
    weight_side,
)
from .double_backward import first_derivative
from .gemm_operand import Side, both_plain, plain, quantized_gemms, side_of_fields, turned
from .grouped_operand import RowsSide, keep_rows, rows_sides, wgrad_rows
from .saved_input import Kept, gradient_sides, keep, note_statistics
from .weight_format import check_format, check_operands
from .wgrad import WeightGradient, run_wgrad

MIN_ROW_ALIGNMENT = 16
"""Rows that grouped GEMMs on an accelerator want groups to begin at a multiple of, where they are contracted."""


def grouped_fprop(
    x: Tensor | QuantizedStorage,
    weights: tuple[Tensor, ...],
    cached: QuantizedTensor | None,
    rows: RowGroups,
    live: LiveState,
    quantizers: GemmQuantizers,
    options: GemmOptions,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
    aligned: bool = False,
) -> tuple[Tensor, Kept, tuple[Tensor, ...]]:
    """Return (`x[g] w[g]^T` for each group of rows, [T, N]; how to read what is kept; what is kept).

    x: [T, K] in `dtype`, that of the GEMMs, or `GroupedRows` of the input quantizer; weights: one [G, N, K] or G of
    [N, K], plain or quantized; cached: the weights quantized in an earlier micro-batch; needs: whether the gradients of
    x and of the weights will be wanted; aligned: whether the rows are those of `aligned_rows`, which may come
    quantized.
    """
    x_quantizer = bind(quantizers.input, live.scale, live.amax, "input")
    if live.statistics is not None:
        assert isinstance(x, Tensor), "statistics are those of the values before quantization"
        noted = live.statistics[0]
        note_statistics(noted[0], bind(quantizers.input, live.scale, None, "input"), x, rows=rows)
        if cached is None and not isinstance(weights[0], QuantizedTensor):
            note_statistics(noted[1], bind(quantizers.weight, live.scale, None, "weight"), stacked(weights))
    fields: Fields = {}
    if quantizers is HIGH_PRECISION and isinstance(weights[0], QuantizedTensor):  # as in `dense_fprop`
        weights = (plain_weights(weights, dtype),)
    if cached is None and not isinstance(weights[0], QuantizedTensor):
        weight, fields = fprop_weight(stacked(weights), quantizers, dtype, live, needs[0], None)
    else:
        if isinstance(weights[0], QuantizedTensor):
            check_operands(weights[0], quantizers, needs[0])
        weight = _weights_side(weights, cached, quantizers.weight, "rowwise", dtype, live.scale, live.amax)
    how = (quantizers.backward_override, options.save_original_input, needs[1])
    if aligned:
        side, kept, tensors = keep(x_quantizer, x, dtype, *how)
        left = RowsSide(side, None)
    else:
        assert isinstance(x, Tensor), "fields alone are of aligned rows"
        left, kept, tensors = keep_rows(x_quantizer, x, rows, dtype, alignment(quantizers, x.device), *how)
    kept = replace(kept, weight_names=tuple(fields)) if fields else kept
    return _rows_product(left, weight, "rowwise", rows, dtype), kept, (*tensors, *fields.values())


def grouped_gradients(
    dy: Tensor,
    weights: tuple[Tensor, ...],
    cached: QuantizedTensor | None,
    into: tuple[Tensor, ...],
    rows: RowGroups,
    live: LiveState,
    quantizers: GemmQuantizers,
    options: GemmOptions,
    kept: Kept,
    tensors: list[Tensor],
    dtype: torch.dtype,
    needs: tuple[bool, bool],
    aligned: bool = False,
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """Return the gradients of x and of each weight of `grouped_fprop`, those that are needed and go to autograd.

    dy: [T, N]; into: the main gradients, one per weight, where the options want them; kept, tensors: from
    `grouped_fprop`.
    """
    override, scale, key = quantizers.backward_override, live.scale, live.key
    of_x, fields = kept.parts(tensors)
    quantizer = IdentityQuantizer()
    if not override:
        quantizer = bind_gradient(quantizers.grad_output, live.gradient)
        if live.grad_statistics is not None:
            unrecorded = bind_gradient(quantizers.grad_output, live.gradient, record=False)
            note_statistics(live.grad_statistics[0], unrecorded, dy, key, rows)
    align = alignment(quantizers, dy.device)
    usages: tuple[Usage, ...] = tuple(u for u, needed in zip(USAGES, needs, strict=True) if needed)
    if aligned:
        found = gradient_sides(quantizer, dy, usages, dtype, key)
        dy_sides = {usage: RowsSide(side, None) for usage, side in found.items()}
    else:
        dy_sides = rows_sides(quantizer, dy, rows, usages, dtype, align, key)
    dx = None
    if needs[0]:
        if override == "high_precision":
            weight = turned(Operand(plain_weights(weights, dtype), None), "columnwise")
        elif override == "dequantized":
            weight = plain(_weights_side(weights, cached, quantizers.weight, "rowwise", dtype, scale, None), dtype)
            weight = turned(Operand(scaled_values(weight, dtype), None), "columnwise")
        elif fields:
            weight = dgrad_weight(stacked(weights), fields, quantizers, dtype, live, None)
        else:
            weight = _weights_side(weights, cached, quantizers.weight, "columnwise", dtype, scale, None)
        dx = _rows_product(dy_sides["rowwise"], weight, "columnwise", rows, dtype)
    dw: tuple[Tensor | None, ...] = (None,) * len(weights)
    if needs[1]:
        left, padding = dy_sides["columnwise"]
        x_quantizer = bind(quantizers.input, scale, None, "input")
        if aligned:
            right = kept.side(x_quantizer, of_x, dtype)
        else:
            right = wgrad_rows(kept, x_quantizer, of_x, rows, dtype, align, override)
        splits = rows.m_splits if padding is None else padding.sizes
        wgrad, stacked_weight = options.wgrad, weights[0].dim() == 3

        def compute() -> tuple[Tensor | None, ...]:
            if not into:
                grouped = _wgrad_product(left, right, splits, weights[0].dtype)
                return (grouped,) if stacked_weight else grouped.unbind(0)
            members = wgrad.each() if wgrad else ()
            if stacked_weight:
                _accumulate_wgrad_(into[0], left, right, splits, not (members and members[0].overwrite))
            else:
                _accumulate_members_(into, left, right, splits, members)
            return (None,) * len(weights)

        found = run_wgrad(wgrad, weights, (left, right), compute)
        dw = tuple(first_derivative(gradient, override, dy, *tensors) for gradient in found)
    return first_derivative(dx, override, dy, *weights), dw


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
    with without_autocast(first.fields[names[0]]):  # torch.amp.autocast refuses to stack eight-bit numbers
        fields = {name: torch.stack([w.fields[name] for w in weights]) for name in names}  # type: ignore[attr-defined]
    return side_of_fields(first.quantizer, fields, usage, dtype, (len(weights), *first.shape))


def alignment(quantizers: GemmQuantizers, device: torch.device) -> int:
    """Return the multiple of rows at which groups begin in the operands of wgrad."""
    align = 1
    if not quantizers.backward_override:
        align = max(quantizer.row_block("columnwise") for quantizer in (quantizers.grad_output, quantizers.input))
    return max(align, MIN_ROW_ALIGNMENT) if quantized_gemms(device) else align


def contractible(rows: Side, dtype: torch.dtype) -> Side:
    """Return rows as grouped GEMMs take them: dequantized where a block has several rows, which no kernel reads."""
    if not isinstance(rows, ScaledOperand) or rows.block is None or rows.block[0] == 1:
        return rows
    values, scale, _ = rows.dequantized(dtype if rows.exact_in_bfloat16 else torch.float32)
    return Operand(values, scale, f"{rows.kind} rows in {rows.block[0]}x{rows.block[1]} blocks")


def _rows_product(left: RowsSide, weight: Side, usage: Usage, rows: RowGroups, dtype: torch.dtype) -> Tensor:
    """fprop and dgrad: rows times their group's matrix. usage: of the weight."""
    values, padding = contractible(left.side, dtype), left.padding
    sizes = rows.m_splits if padding is None else padding.sizes
    if isinstance(values, ScaledOperand) and isinstance(weight, ScaledOperand):
        y = scaled_grouped_gemm(values, weight, sizes, dtype)
        return y if padding is None else padding.unpad(y)
    a, b = both_plain("scaled_grouped_gemm", values, weight, dtype)
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


def plain_weights(weights: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return the weights' high-precision values as one tensor [G, N, K]."""
    plain = [plain_weight(w, dtype) for w in weights]
    return plain[0] if plain[0].dim() == 3 else torch.stack(plain)


def _wgrad_product(left: Side, right: Side, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each group's `left @ right^T` over its rows, [G, N, K]."""
    left, right = contractible(left, dtype), contractible(right, dtype)
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        return scaled_grouped_gemm_wgrad(left, right, splits, dtype)
    a, b = both_plain("scaled_grouped_gemm_wgrad", left, right, dtype)
    dw, scale = grouped_gemm_wgrad(a.values.mT, b.values.mT, splits), epilogue_scale(a, b)
    return (dw if scale is None else dw.float() * scale[:, None, None]).to(dtype)


def _accumulate_wgrad_(main_grad: Tensor, left: Side, right: Side, splits: Tensor, accumulate: bool) -> None:
    left, right = contractible(left, torch.bfloat16), contractible(right, torch.bfloat16)
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        scaled_grouped_gemm_wgrad_accumulate_(main_grad, left, right, splits, accumulate=accumulate)
        return
    a, b = both_plain("scaled_grouped_gemm_wgrad", left, right, torch.bfloat16)
    grouped_gemm_wgrad_accumulate_(main_grad, a.values.mT, b.values.mT, splits, accumulate, epilogue_scale(a, b))


def _accumulate_members_(
    main_grads: tuple[Tensor, ...], left: Side, right: Side, splits: Tensor, members: tuple[WeightGradient, ...]
) -> None:
    """Add the groups' products to main gradients that lie apart, each [N, K], or write them there; by way of one
    float32 tensor [G, N, K], since the kernels write to one. main_grads: of those members that want a gradient."""
    grouped = main_grads[0].new_empty((len(members), *main_grads[0].shape), dtype=torch.float32)
    _accumulate_wgrad_(grouped, left, right, splits, False)
    wanted = [(how, gradient) for how, gradient in zip(members, grouped.unbind(0), strict=True) if how.wanted]
    for main_grad, (how, gradient) in zip(main_grads, wanted, strict=True):
        if how.overwrite:
            main_grad.copy_(gradient)
        else:
            main_grad.add_(gradient)
