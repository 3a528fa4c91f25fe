"""One GEMM per group of rows, in high precision or under a recipe, differentiable: the function behind GroupedLinear.

The three GEMMs are those of `grouped_gemms`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.grouped_gemm import grouped_gemm
from te_models.kernels.torch_versions import own_result

from .autocast import state
from .dense_gemms import DEFAULT_OPTIONS, HIGH_PRECISION, GemmOptions, plain_weight
from .given_rows import rows_or_values
from .grouped_gemms import bias_rows_gradient, grouped_fprop, grouped_gradients, stacked, wgrad_alignment
from .linear_function import gradients_wanted, largest
from .module import compute_dtype
from .quantized_module import LiveState, QuantizedModule
from .quantized_tensor import QuantizedTensor
from .recipe import GemmQuantizers
from .row_groups import RowGroups


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

    module: whose quantizers and live state serve. x: [T, K], or rows quantized already, `GroupedRows` under the same
    splits: those that the recipe's input quantizer would have made are not quantized again. weights: one [G, N, K]
    tensor, or G of [N, K]; bias: [G, N] or None; m_splits: [G] integer; cached: the weights quantized in an earlier
    micro-batch, [G, N, K]. Rows past the last group are zero.
    """
    dtype = compute_dtype(x)
    quantizers = module.quantizers()
    align = 1 if quantizers is None else wgrad_alignment(quantizers, x.device)
    x = rows_or_values(x, m_splits, quantizers, dtype, align)
    rows = RowGroups.of(m_splits, x.shape[0])
    if state().calibrating:
        module.calibrate("input", rows.amax(x))
        module.calibrate("weight", largest(stacked(weights)))
    if quantizers is None and options.wgrad is None:
        plain = [plain_weight(w, dtype) for w in weights]
        y = grouped_gemm(x, plain[0] if plain[0].dim() == 3 else torch.stack(plain), m_splits)
    else:
        quantizers = quantizers or HIGH_PRECISION
        live = module.live_state(quantizers)
        main_grad = None if options.wgrad is None else options.wgrad.main_grad
        (needs_dgrad,) = gradients_wanted(x)
        y = _GroupedLinear.apply(
            x, *rows.tensors(), cached, main_grad, *live, needs_dgrad, quantizers, options, *weights
        )
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


class _GroupedLinear(torch.autograd.Function):
    """x: [T, K] in the compute dtype; m_splits, ends, group: of RowGroups; weights: one [G, N, K] or G of [N, K], plain
    or quantized."""

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
        needs_dgrad: bool,
        quantizers: GemmQuantizers,
        options: GemmOptions,
        *weights: Tensor,
    ) -> Tensor:
        live = LiveState(scale, amax, grad_amax, statistics, grad_statistics, key)
        rows = RowGroups(m_splits, ends, group)
        y, fields = grouped_fprop(x, weights, cached, rows, live, quantizers, needs_dgrad)
        ctx.save_for_backward(x, m_splits, ends, group, cached, scale, key, *weights, *fields.values())
        # not saved, as in `_Linear`
        ctx.main_grad, ctx.grad_amax, ctx.grad_statistics = main_grad, grad_amax, grad_statistics
        ctx.quantizers, ctx.options, ctx.names, ctx.weights = quantizers, options, tuple(fields), len(weights)
        return own_result(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, m_splits, ends, group, cached, scale, key, *rest = ctx.saved_tensors
        weights, fields = rest[: ctx.weights], dict(zip(ctx.names, rest[ctx.weights :], strict=True))
        live = LiveState(scale, None, ctx.grad_amax, None, ctx.grad_statistics, key)
        dx, dw = grouped_gradients(
            dy,
            x,
            tuple(weights),
            cached,
            ctx.main_grad,
            RowGroups(m_splits, ends, group),
            live,
            ctx.quantizers,
            ctx.options,
            (ctx.needs_input_grad[0], any(ctx.needs_input_grad[15:])),
            fields,
        )
        return dx, *(None,) * 14, *dw
