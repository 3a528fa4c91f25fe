"""One GEMM per group of rows, in high precision or under a recipe, differentiable: the function behind GroupedLinear.

The three GEMMs are those of `grouped_gemms`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.custom_op import direct
from te_models.kernels.grouped_gemm import grouped_gemm
from te_models.kernels.permute import Permutation, permute, unpermute
from te_models.kernels.torch_versions import own_result

from ..module.base import LiveState, QuantizedModule
from ..module.parameters import compute_dtype
from ..quantizer.group_offsets import RowGroups
from ..recipe.base import HIGH_PRECISION, GemmQuantizers
from ..recipe.context import state
from ..tensor.quantized_tensor import QuantizedTensor
from .aligned_rows import is_aligned, permuted
from .dense_gemms import DEFAULT_OPTIONS, GemmOptions
from .grouped_gemms import alignment, bias_rows_gradient, grouped_fprop, grouped_gradients, plain_weights, stacked
from .linear import gradients_wanted, largest
from .quantized_rows import rows_or_values
from .wgrad import main_grads

_grouped_gemm = direct(grouped_gemm)


def grouped_linear(
    module: QuantizedModule,
    x: Tensor,
    weights: tuple[Tensor, ...],
    bias: Tensor | None,
    m_splits: Tensor,
    *,
    cached: QuantizedTensor | None = None,
    options: GemmOptions = DEFAULT_OPTIONS,
    permutation: Permutation | None = None,
    row_align: int = 1,
) -> Tensor:
    """Return `x[g] @ weight[g]^T + bias[g]` for each group of rows, under the recipe in force.

    module: whose quantizers and live state serve. x: [T, K], or rows quantized already, `GroupedRows` under the same
    splits: those that the recipe's input quantizer would have made are not quantized again. weights: one [G, N, K]
    tensor, or G of [N, K]; bias: [G, N] or None; m_splits: [G] integer; cached: the weights quantized in an earlier
    micro-batch, [G, N, K]. Rows past the last group are zero.
    permutation: x are tokens, and the rows are what `permute` makes of them. row_align: a number that all splits are
    multiples of, the rows that fill them up being zeros.
    """
    dtype = compute_dtype(x)
    quantizers = module.quantizers()
    aligned = quantizers is not None and is_aligned(quantizers, x.device, row_align)
    if permutation is not None and not (aligned and permutation.padding_rows is not None):
        x, permutation = permute(x, permutation), None
    if permutation is None:
        align = 1 if quantizers is None else alignment(quantizers, x.device)
        x = rows_or_values(x, m_splits, quantizers, dtype, align)
    aligned = aligned and not isinstance(x, QuantizedTensor)
    high_precision = quantizers is None and options.wgrad is None
    if high_precision and bias is None and not state().calibrating:
        return _grouped_gemm(x, plain_weights(weights, dtype), m_splits)
    rows = RowGroups.of(m_splits, x.shape[0] if permutation is None else permutation.slot_of_row.shape[0])
    if state().calibrating:
        module.calibrate("input", rows.amax(x))
        module.calibrate("weight", largest(stacked(weights)))
    if high_precision:
        y = _grouped_gemm(x, plain_weights(weights, dtype), m_splits)
    else:
        quantizers = quantizers or HIGH_PRECISION
        live = module.live_state(quantizers)
        needs = (any(gradients_wanted(x)), any(gradients_wanted(*weights)))
        constants = (needs, dtype, quantizers, options, aligned, len(weights))
        tensors = (*weights, *main_grads(options.wgrad))
        order = (None, None, None) if permutation is None else _order(permutation)
        y = _GroupedLinear.apply(x, *order, *rows.tensors(), cached, *live, *constants, *tensors)
    return y if bias is None else y + _BiasRows.apply(bias.to(dtype), *rows.tensors())


def add_bias_rows(y: Tensor, bias: Tensor, m_splits: Tensor) -> Tensor:
    """Return y: [T, N] plus bias: [G, N] of each row's group."""
    return y + _BiasRows.apply(bias.to(y.dtype), *RowGroups.of(m_splits, y.shape[0]).tensors())


class _BiasRows(torch.autograd.Function):
    """bias: [G, N] -> [T, N], each row its group's."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, m_splits: Tensor, ends: Tensor, group: Tensor) -> Tensor:
        ctx.save_for_backward(m_splits)
        return RowGroups(m_splits, ends, group).per_row(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (m_splits,) = ctx.saved_tensors
        return bias_rows_gradient(dy, m_splits), None, None, None


def _order(permutation: Permutation) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the fields that place rows. The counts may be the splits themselves, and no tensor may be given twice."""
    return permutation.slot_of_row, permutation.row_of_slot, permutation.padding_rows


def _permutation(
    slot_of_row: Tensor | None, row_of_slot: Tensor | None, padding_rows: Tensor | None, m_splits: Tensor
) -> Permutation | None:
    """Undo `_order`; the counts, which nobody reads here, are the splits."""
    if slot_of_row is None or row_of_slot is None:
        return None
    return Permutation(slot_of_row, row_of_slot, m_splits, m_splits, padding_rows)


class _GroupedLinear(torch.autograd.Function):
    """x: [T, K] in `dtype`, that of the GEMMs, or quantized; m_splits, ends, group: of RowGroups; needs: whether the
    gradients of x and of the weights are wanted; tensors: the weights, one [G, N, K] or G of [N, K], plain or
    quantized, and then the main gradients, if there are any; count: how many weights. Where slot_of_row, row_of_slot
    and padding_rows of a Permutation are given, x are tokens [tokens, K] of any dtype, and the rows are made of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        slot_of_row: Tensor | None,
        row_of_slot: Tensor | None,
        padding_rows: Tensor | None,
        m_splits: Tensor,
        ends: Tensor,
        group: Tensor,
        cached: QuantizedTensor | None,
        scale: Tensor | None,
        amax: Tensor | None,
        gradient: Tensor | None,
        statistics: Tensor | None,
        grad_statistics: Tensor | None,
        key: Tensor | None,
        needs: tuple[bool, bool],
        dtype: torch.dtype,
        quantizers: GemmQuantizers,
        options: GemmOptions,
        aligned: bool,
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
        weights = tensors[:count]
        live = LiveState(scale, amax, gradient, statistics, grad_statistics, key)
        rows = RowGroups(m_splits, ends, group)
        order = _permutation(slot_of_row, row_of_slot, padding_rows, m_splits)
        given = x if order is None else permuted(x, order, quantizers, dtype)
        y, ctx.kept, kept = grouped_fprop(
            given, weights, cached, rows, live, quantizers, options, dtype, needs, aligned
        )
        permutation = slot_of_row, row_of_slot, padding_rows
        ctx.save_for_backward(*permutation, m_splits, ends, group, cached, scale, key, *weights, *kept)
        # not saved, as in `_Linear`
        ctx.main_grads, ctx.gradient, ctx.grad_statistics = tensors[count:], gradient, grad_statistics
        ctx.quantizers, ctx.options, ctx.dtype, ctx.weights = quantizers, options, dtype, count
        ctx.aligned, ctx.x_dtype = aligned, x.dtype
        return own_result(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # read once: a checkpoint of another library recomputes for one reading
        slot, row, padding, m_splits, ends, group, cached, scale, key, *rest = ctx.saved_tensors
        live = LiveState(scale, None, ctx.gradient, None, ctx.grad_statistics, key)
        dx, dw = grouped_gradients(
            dy,
            tuple(rest[: ctx.weights]),
            cached,
            ctx.main_grads,
            RowGroups(m_splits, ends, group),
            live,
            ctx.quantizers,
            ctx.options,
            ctx.kept,
            list(rest[ctx.weights :]),
            ctx.dtype,
            (ctx.needs_input_grad[0], any(ctx.needs_input_grad[20 : 20 + ctx.weights])),
            ctx.aligned,
        )
        order = _permutation(slot, row, padding, m_splits)
        if dx is not None and order is not None:
            dx = unpermute(dx, order, None, dtype=ctx.x_dtype)
        return dx, *(None,) * 19, *dw, *(None,) * len(ctx.main_grads)
