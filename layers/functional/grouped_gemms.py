"""The three GEMMs of a grouped layer under a recipe, as functions that know nothing of autograd.

T rows sorted by group, G groups (GEMMs), K in, N out. The three GEMMs and the usage of each operand are those of
`dense_gemms`; what is new is that every group is quantized by itself: per-tensor scales are one per group, and blocks
that span rows stay inside their group (see `rows_operands`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from te_models.kernels.custom_op import direct
from te_models.kernels.gemm import Operand, ScaledOperand, epilogue_scale, scaled
from te_models.kernels.gemm.cpu import unrounded
from te_models.kernels.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_accumulate_,
    scaled_grouped_gemm,
    scaled_grouped_gemm_wgrad,
    scaled_grouped_gemm_wgrad_accumulate_,
)
from te_models.kernels.grouped_gemm.scaled import dequantized_wgrad
from te_models.kernels.without_autocast import without_autocast

from ..quantizer import Fields, Usage
from ..quantizer.group_offsets import GroupOffsets
from ..recipe.base import HIGH_PRECISION, GemmQuantizers
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedStorage
from .dense_gemms import (
    dgrad_weight,
    fprop_weight,
    plain_weight,
    scaled_values,
    weight_operand,
)
from .double_backward import first_derivative
from .gemm_operand import (
    GemmOperand,
    both_dequantized,
    dequantized,
    in_cpu_graph,
    operands_on,
    quantized_gemms,
    quantized_operand,
    stored_operand,
    transposed,
)
from .grouped_operand import RowsOperand, quantize_and_save_rows, rows_operands, saved_rows_operand
from .saved_input import (
    USAGES,
    SavedInput,
    quantize_and_save,
    shared_gradient_operands,
)
from .scaling import Scaling
from .weight_format import check_format, check_operands
from .wgrad import WeightGradient, run_wgrad

grouped_gemm_directly = direct(grouped_gemm)
"""Without the dispatcher's Python where that changes nothing."""

MIN_ROW_ALIGNMENT = 16
"""Rows that grouped GEMMs on an accelerator want groups to begin at a multiple of, where they are contracted."""


def grouped_fprop(
    x: Tensor | QuantizedStorage,
    weights: tuple[Tensor, ...],
    cached: QuantizedTensor | None,
    offsets: GroupOffsets,
    scaling: Scaling,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
    aligned: bool = False,
) -> tuple[Tensor, SavedInput, tuple[Tensor, ...]]:
    """Return (`x[g] w[g]^T` for each group of rows, [T, N]; how to read what is saved; what is saved).

    x: [T, K] in `dtype`, the GEMMs' dtype, or `GroupedRows` of the input quantizer; weights: one [G, N, K] or G of
    [N, K], plain or quantized; cached: the weights quantized in an earlier micro-batch; needs: whether the gradients of
    x and of the weights will be wanted; aligned: whether the groups are aligned (`grouped_operand`); such rows may come
    quantized.
    """
    quantizers, options, _ = scaling.config
    stored = cached is not None or isinstance(weights[0], QuantizedTensor)
    if scaling.state.statistics is not None:
        assert isinstance(x, Tensor), "statistics describe the values before quantization"
        scaling.record_statistics(x, None if stored else lambda: stacked(weights), offsets)
    x_quantizer = scaling.for_input(records=True)
    fields: Fields = {}
    if quantizers is HIGH_PRECISION and isinstance(weights[0], QuantizedTensor):  # as in `fprop_weight`
        weights = (plain_weights(weights, dtype),)
    if cached is None and not isinstance(weights[0], QuantizedTensor):
        weight, fields = fprop_weight(stacked(weights), scaling, dtype, needs[0], operands_on(x.device))
    else:
        if isinstance(weights[0], QuantizedTensor):
            check_operands(weights[0], quantizers, needs[0])
        weight = _weights_operand(weights, cached, scaling, "rowwise", dtype)
    saving = (quantizers.backward_override, options.save_original_input, needs[1])
    if aligned:
        operand, saved, tensors = quantize_and_save(x_quantizer, x, dtype, *saving, operands_on(x.device))
        left = RowsOperand(operand, None)
    else:
        assert isinstance(x, Tensor), "fields alone are of aligned rows"
        align = row_alignment(quantizers, x.device)
        left, saved, tensors = quantize_and_save_rows(x_quantizer, x, offsets, dtype, align, *saving)
    saved = replace(saved, weight_names=tuple(fields)) if fields else saved
    return _rows_gemm(left, weight, "rowwise", offsets, dtype), saved, (*tensors, *fields.values())


def grouped_gradients(
    dy: Tensor,
    weights: tuple[Tensor, ...],
    cached: QuantizedTensor | None,
    main_grads: tuple[Tensor, ...],
    offsets: GroupOffsets,
    scaling: Scaling,
    saved: SavedInput,
    tensors: list[Tensor],
    dtype: torch.dtype,
    needs: tuple[bool, bool],
    aligned: bool = False,
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """Return the gradients of x and of each weight of `grouped_fprop`, those that are needed and go to autograd.

    dy: [T, N]; main_grads: one per weight, where the options want them; saved, tensors: from `grouped_fprop`.
    """
    quantizers, options, _ = scaling.config
    override, key = quantizers.backward_override, scaling.state.key
    of_x, fields = saved.parts(tensors)
    quantizer = scaling.for_gradient(dy, offsets.amax, offsets)
    align = row_alignment(quantizers, dy.device)
    of_dy: dict[Usage, RowsOperand] = {}
    if aligned:
        shared = shared_gradient_operands(quantizer, dy, dtype, key, saved.on) if all(needs) else {}
        of_dy = {usage: RowsOperand(operand, None) for usage, operand in shared.items()}
    elif quantized_gemms(dy.device) or (quantizer.symmetric and in_cpu_graph(dy.device)):
        # equal copies side by side are one copy in a graph
        usages: tuple[Usage, ...] = tuple([u for u, needed in zip(USAGES, needs, strict=True) if needed])
        of_dy = rows_operands(quantizer, dy, offsets, usages, dtype, align, key)

    def rows_of_dy(usage: Usage) -> RowsOperand:
        """The copy for a GEMM; one that is not shared is made as that comes to it, and ends with it."""
        if of_dy:
            return of_dy[usage]
        if aligned:
            return RowsOperand(quantized_operand(quantizer, dy, usage, dtype, key), None)
        return rows_operands(quantizer, dy, offsets, (usage,), dtype, align, key)[usage]

    dx = None
    if needs[0]:
        if override == "high_precision":
            weight = transposed(Operand(plain_weights(weights, dtype), None), "columnwise")
        elif override == "dequantized":
            rowwise = _weights_operand(weights, cached, scaling, "rowwise", dtype)
            weight = transposed(Operand(scaled_values(dequantized(rowwise, dtype), dtype), None), "columnwise")
        elif fields:
            weight = dgrad_weight(stacked(weights), fields, scaling, dtype)
        else:
            weight = _weights_operand(weights, cached, scaling, "columnwise", dtype)
        dx = _rows_gemm(rows_of_dy("rowwise"), weight, "columnwise", offsets, dtype)
    dw: tuple[Tensor | None, ...] = (None,) * len(weights)
    if needs[1]:
        left, padding = rows_of_dy("columnwise")
        x_quantizer = scaling.for_input()
        if aligned:
            right = saved.operand(x_quantizer, of_x, dtype)
        else:
            right = saved_rows_operand(saved, x_quantizer, of_x, offsets, dtype, align, override)
        splits = offsets.m_splits if padding is None else padding.sizes
        wgrad, one_weight = options.wgrad, weights[0].dim() == 3

        def compute() -> tuple[Tensor | None, ...]:
            if not main_grads:
                grouped = _wgrad_gemm(left, right, splits, weights[0].dtype)
                return (grouped,) if one_weight else grouped.unbind(0)
            members = wgrad.each() if wgrad else ()
            if one_weight:
                _accumulate_wgrad_(main_grads[0], left, right, splits, not (members and members[0].overwrite))
            else:
                _accumulate_members_(main_grads, left, right, splits, members)
            return (None,) * len(weights)

        found_dw = run_wgrad(wgrad, weights, (left, right), compute)
        dw = tuple([first_derivative(gradient, override, dy, *tensors) for gradient in found_dw])
    return first_derivative(dx, override, dy, *weights), dw


def bias_rows_gradient(dy: Tensor, m_splits: Tensor) -> Tensor:
    """Return the gradient of a bias [G, N] from dy [T, N]: a GEMM with ones, which unlike the scatter that autograd
    would derive sums in one order everywhere."""
    return grouped_gemm_wgrad(dy, dy.new_ones(dy.shape[0], 1), m_splits).squeeze(-1)


def _weights_operand(
    weights: tuple[Tensor, ...],
    cached: QuantizedTensor | None,
    scaling: Scaling,
    usage: Usage,
    dtype: torch.dtype,
) -> GemmOperand:
    """Return the weights as one operand, [G, N, K] or [G, K, N], stored ones exactly as they are."""
    weight = weights[0] if cached is None else cached
    if weight.dim() == 3 or not isinstance(weight, QuantizedTensor):
        one = weight if weight.dim() == 3 else torch.stack(weights)
        return weight_operand(one, scaling, usage, dtype)
    check_format(weight, scaling.config.quantizers.weight)
    names = weight.quantizer.field_names()
    with without_autocast(weight.fields[names[0]]):  # torch.amp.autocast refuses to stack eight-bit numbers
        fields = {name: torch.stack([w.fields[name] for w in weights]) for name in names}  # type: ignore[attr-defined]
    return stored_operand(weight.quantizer, fields, usage, dtype, (len(weights), *weight.shape))


def row_alignment(quantizers: GemmQuantizers, device: torch.device) -> int:
    """Return the multiple of rows at which groups begin in the operands of wgrad."""
    return max(quantizers.row_align, MIN_ROW_ALIGNMENT) if quantized_gemms(device) else quantizers.row_align


def contractible(rows: GemmOperand, dtype: torch.dtype) -> GemmOperand:
    """Return rows as grouped GEMMs take them: dequantized where a block has several rows, which no kernel reads."""
    if not isinstance(rows, ScaledOperand) or rows.block is None or rows.block[0] == 1:
        return rows
    values, scale, _ = rows.dequantized(dtype if rows.exact_in_bfloat16 else torch.float32)
    return Operand(values, scale, f"{rows.kind} rows in {rows.block[0]}x{rows.block[1]} blocks")


def _rows_gemm(
    left: RowsOperand, weight: GemmOperand, usage: Usage, offsets: GroupOffsets, dtype: torch.dtype
) -> Tensor:
    """fprop and dgrad: rows times their group's matrix. usage: of the weight."""
    values, padding = contractible(left.operand, dtype), left.padding
    sizes = offsets.m_splits if padding is None else padding.sizes
    if isinstance(values, ScaledOperand) and isinstance(weight, ScaledOperand):
        y = scaled_grouped_gemm(values, weight, sizes, dtype)
        return y if padding is None else padding.unpad(y)
    a, b = both_dequantized("scaled_grouped_gemm", values, weight, dtype)
    fprop, scale = usage == "rowwise", epilogue_scale(a, b)
    x, w = (a.values, b.values) if scale is None else unrounded(a.values, b.values)
    y = grouped_gemm_directly(x, w if fprop else w.mT, sizes, fprop)
    y = y if padding is None else padding.unpad(y)
    return y.to(dtype) if scale is None else scaled(y, offsets.per_row(scale)[:, None], dtype)


def stacked(weights: tuple[Tensor, ...]) -> Tensor:
    """Return the weights as one tensor [G, N, K]; quantized members are dequantized."""
    if weights[0].dim() == 3:
        return weights[0]
    return torch.stack([w.dequantize() if isinstance(w, QuantizedTensor) else w for w in weights])


def plain_weights(weights: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return the weights' high-precision values as one tensor [G, N, K]."""
    values = [plain_weight(w, dtype) for w in weights]
    return values[0] if values[0].dim() == 3 else torch.stack(values)


def _wgrad_gemm(left: GemmOperand, right: GemmOperand, splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each group's `left @ right^T` over its rows, [G, N, K]."""
    left, right = contractible(left, dtype), contractible(right, dtype)
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        return scaled_grouped_gemm_wgrad(left, right, splits, dtype)
    a, b = both_dequantized("scaled_grouped_gemm_wgrad", left, right, dtype)
    return dequantized_wgrad(a, b, splits, dtype)


def _accumulate_wgrad_(
    main_grad: Tensor, left: GemmOperand, right: GemmOperand, splits: Tensor, accumulate: bool
) -> None:
    left, right = contractible(left, torch.bfloat16), contractible(right, torch.bfloat16)
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        scaled_grouped_gemm_wgrad_accumulate_(main_grad, left, right, splits, accumulate=accumulate)
        return
    a, b = both_dequantized("scaled_grouped_gemm_wgrad", left, right, torch.bfloat16)
    grouped_gemm_wgrad_accumulate_(main_grad, a.values.mT, b.values.mT, splits, accumulate, epilogue_scale(a, b))


def _accumulate_members_(
    main_grads: tuple[Tensor, ...],
    left: GemmOperand,
    right: GemmOperand,
    splits: Tensor,
    members: tuple[WeightGradient, ...],
) -> None:
    """Add the groups' products to main gradients that lie apart, each [N, K], or write them there; by way of one
    float32 tensor [G, N, K], since the kernels write to one. main_grads: of those members that want a gradient."""
    grouped = main_grads[0].new_empty((len(members), *main_grads[0].shape), dtype=torch.float32)
    _accumulate_wgrad_(grouped, left, right, splits, False)
    wanted = [(member, dw) for member, dw in zip(members, grouped.unbind(0), strict=True) if member.wanted]
    for main_grad, (member, dw) in zip(main_grads, wanted, strict=True):
        if member.overwrite:
            main_grad.copy_(dw)
        else:
            main_grad.add_(dw)
