"""`y = x w^T + b` in high precision or under a recipe, differentiable: the function behind every dense module.

The formula is plain Python around kernels on plain tensors, not one opaque operation per layer, so that the compiler
fuses the quantizations with the norms and activations around them. The three GEMMs are those of `dense_gemms`. Live
state comes in as tensors; nothing is hidden in objects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm.dense import linear as dense
from te_models.kernels.torch_versions import fix_width, own_result

from ..module.base import LiveState, QuantizedModule
from ..module.parameters import compute_dtype
from ..recipe.base import HIGH_PRECISION, GemmQuantizers
from ..recipe.context import state
from ..tensor.quantized_tensor import QuantizedTensor
from .dense_gemms import (
    DEFAULT_OPTIONS,
    GemmOptions,
    How,
    bias_gradient,
    dense_fprop,
    dense_gradients,
)


def linear(
    module: QuantizedModule,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gemm: int = 0,
    cached: QuantizedTensor | None = None,
    options: GemmOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Return `x @ weight^T + bias` in the compute dtype, under the recipe in force.

    module: whose quantizers and live state serve, in column `gemm`. x: [..., in]; weight: [out, in], plain or
    quantized; bias: [out] or None; cached: the weight quantized in an earlier micro-batch.
    """
    return linear_by(module.quantizers(), module, x, weight, bias, gemm, cached, options)


def linear_by(
    quantizers: GemmQuantizers | None,
    module: QuantizedModule,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gemm: int,
    cached: QuantizedTensor | None,
    options: GemmOptions,
) -> Tensor:
    """Return `linear` for a caller that has asked for the module's quantizers already."""
    dtype = compute_dtype(x)
    x = x.to(dtype)
    if state().calibrating:
        module.calibrate("input", largest(x.reshape(-1, x.shape[-1])), gemm)
        module.calibrate("weight", largest(weight), gemm)
    if quantizers is None and options.wgrad is None:
        if isinstance(weight, QuantizedTensor):
            weight = weight.dequantize(dtype)
        return dense(x, weight.to(dtype), None if bias is None else bias.to(dtype))
    quantizers = quantizers or HIGH_PRECISION
    return run_linear(x, weight, bias, cached, module.live_state(quantizers), How(quantizers, options, gemm))


def run_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, cached: QuantizedTensor | None, live: LiveState, how: How
) -> Tensor:
    """Return `linear` of x [..., in] in the compute dtype, with the live state that the module gave out for it."""
    fix_width(x)
    rows = x.reshape(-1, x.shape[-1])
    main_grad = None if how.options.wgrad is None else how.options.wgrad.main_grad
    y = _Linear.apply(rows, weight, bias, cached, main_grad, *live, gradients_wanted(x, weight), *how)
    return y.view(*x.shape[:-1], weight.shape[0])


def gradients_wanted(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Return whether the gradient of each will be wanted; asked outside of an autograd function, which says so of a
    parameter under no_grad, too, and would keep what no backward pass reads."""
    return tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)


def largest(x: Tensor) -> Tensor:
    """Return the amax of a tensor, [] for a matrix and [G] for G of them."""
    return q.amax(x.dequantize() if isinstance(x, QuantizedTensor) else x.detach())


class _Linear(torch.autograd.Function):
    """x: [T, K] in the compute dtype; weight: [N, K] plain or quantized; bias: [N] or None; wanted: whether the
    gradients of x and of the weight are."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cached: QuantizedTensor | None,
        main_grad: Tensor | None,
        scale: Tensor | None,
        amax: Tensor | None,
        gradient: Tensor | None,
        statistics: Tensor | None,
        grad_statistics: Tensor | None,
        key: Tensor | None,
        wanted: tuple[bool, bool],
        *how: Any,
    ) -> Tensor:
        live = LiveState(scale, amax, gradient, statistics, grad_statistics, key)
        y, ctx.kept, tensors = dense_fprop(x, weight, bias, cached, live, How(*how), x.dtype, wanted)
        ctx.save_for_backward(weight, cached, scale, key, *tensors)
        # not saved: backward writes to them, also between the forward and the backward pass of another call
        ctx.main_grad, ctx.gradient, ctx.grad_statistics = main_grad, gradient, grad_statistics
        ctx.how = how
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtype = x.dtype
        return own_result(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, cached, scale, key, *tensors = ctx.saved_tensors
        live = LiveState(scale, None, ctx.gradient, None, ctx.grad_statistics, key)
        needs = ctx.needs_input_grad
        dx, dw = dense_gradients(
            dy, weight, cached, ctx.main_grad, live, How(*ctx.how), ctx.kept, tensors, ctx.dtype, needs[:2]
        )
        db = bias_gradient(dy, ctx.bias_dtype) if needs[2] else None
        return dx, dw, db, *(None,) * 12
