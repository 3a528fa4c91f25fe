"""A norm or an activation and the linear layer behind it: on an accelerator the first hands its result over as FP8.

A kernel makes the result and quantizes it in one pass (see `handover`), so the plain result never reaches memory;
backward recomputes nothing, since wgrad reads the quantized copy and the derivative of the first reads its own input.
The numbers are those of the two apart. Elsewhere, and where a recipe wants the plain result, they are two functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.activation import Activation
from te_models.kernels.norm import Norm
from te_models.kernels.quantize import QuantizedOutput
from te_models.kernels.torch_versions import fix_width, own_result

from ..module.base import LiveState, QuantizedModule
from ..module.parameters import autocast_dtype
from ..recipe.context import state
from ..tensor.quantized_tensor import QuantizedTensor
from .dense_gemms import DEFAULT_OPTIONS, GemmOptions, How, bias_gradient, dense_fprop, dense_gradients
from .fused_quantize import fused_output, handed_over, input_quantizer
from .gemm_operand import quantized_gemms
from .linear import gradients_wanted, linear_by, run_linear


def preceded_linear(
    module: QuantizedModule,
    first: Norm | Activation,
    x: Tensor,
    parameters: tuple[Tensor | None, Tensor | None],
    weight: Tensor,
    bias: Tensor | None,
    *,
    gemm: int = 0,
    cached: QuantizedTensor | None = None,
    options: GemmOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Return `linear(module, first(x), weight, bias)`. parameters: the norm's weight and bias, None for an activation.

    x: [..., H]; for a gated activation [..., 2 H]. The other arguments: see `linear`.
    """
    quantizers = module.quantizers()
    if quantizers is None or state().calibrating or not quantized_gemms(x.device):
        return linear_by(quantizers, module, _plain(first, x, parameters), weight, bias, gemm, cached, options)
    dtype = first.output_dtype(x, *parameters) if isinstance(first, Norm) else x.dtype
    wanted = autocast_dtype(x.device.type) or dtype
    how, live = How(quantizers, options, gemm), module.live_state(quantizers)
    *before, keeps = gradients_wanted(x, *parameters, weight)
    quantizer = input_quantizer(how, live, keeps, x.device)
    if fused_output(quantizer, dtype, wanted) is None:
        return run_linear(_plain(first, x, parameters).to(wanted), weight, bias, cached, live, how)
    main_grad = None if options.wgrad is None else options.wgrad.main_grad
    fix_width(x)
    return _PrecededLinear.apply(
        x, *parameters, weight, bias, cached, main_grad, *live, first, dtype, any(before), keeps, *how
    )


def _plain(first: Norm | Activation, x: Tensor, parameters: tuple[Tensor | None, Tensor | None]) -> Tensor:
    return first.of(x, *parameters) if isinstance(first, Norm) else first.forward(x)


def _quantized(
    first: Norm | Activation,
    x: Tensor,
    parameters: tuple[Tensor | None, Tensor | None],
    output: QuantizedOutput,
    scale: Tensor | None,
) -> tuple[list[Tensor], tuple[Tensor, ...], tuple[int, ...]]:
    """Return (the copies, what the backward pass of `first` wants, the shape of the plain result)."""
    if isinstance(first, Norm):
        return *first.forward_quantized(x, *parameters, output, scale), tuple(x.shape)
    width = x.shape[-1] // 2 if first.gated else x.shape[-1]
    return first.forward_quantized(x, None, output, scale), (), (*x.shape[:-1], width)


class _PrecededLinear(torch.autograd.Function):
    """x: [..., H]; p, q: the norm's parameters or None; the rest as for `linear_function._Linear`; dtype: of the GEMMs
    and of the plain result of `first`; before, keeps: whether a gradient is wanted of x or a norm's parameter, and of
    the weight. Called only where that result is handed over quantized."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        p: Tensor | None,
        q: Tensor | None,
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
        first: Norm | Activation,
        dtype: torch.dtype,
        before: bool,
        keeps: bool,
        *how: Any,
    ) -> Tensor:
        live = LiveState(scale, amax, gradient, statistics, grad_statistics, key)
        quantizer = input_quantizer(How(*how), live, keeps, x.device)
        fused = fused_output(quantizer, dtype, dtype)
        assert quantizer is not None and fused is not None, "the caller has asked"
        copies, ctx_tensors, shape = _quantized(first, x, (p, q), *fused)
        rows = handed_over(quantizer, copies, shape, dtype)
        y, ctx.kept, tensors = dense_fprop(rows, weight, bias, cached, live, How(*how), dtype, (before, keeps))
        ctx.save_for_backward(x, p, q, weight, cached, scale, key, *ctx_tensors, *tensors)
        # not saved, as in `_Linear`
        ctx.main_grad, ctx.gradient, ctx.grad_statistics = main_grad, gradient, grad_statistics
        ctx.first, ctx.dtype, ctx.how, ctx.shape, ctx.own = first, dtype, how, shape, len(ctx_tensors)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return own_result(y.view(*shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, p, q, weight, cached, scale, key, *rest = ctx.saved_tensors
        own, tensors = tuple(rest[: ctx.own]), rest[ctx.own :]
        live = LiveState(scale, None, ctx.gradient, None, ctx.grad_statistics, key)
        needs, how, main_grad = ctx.needs_input_grad, How(*ctx.how), ctx.main_grad
        before = any(needs[:3])
        rows = dy.reshape(-1, dy.shape[-1])
        between, dw = dense_gradients(
            rows, weight, cached, main_grad, live, how, ctx.kept, tensors, ctx.dtype, (before, needs[3])
        )
        dx = dp = dq = None
        if between is not None:
            between = between.view(ctx.shape)
            if isinstance(ctx.first, Norm):
                dx, dp, dq = ctx.first.backward(between, x, p, q, own, (needs[1], needs[2]))
            else:
                dx, _ = ctx.first.backward(between, x)
        db = bias_gradient(dy, ctx.bias_dtype) if needs[4] else None
        return dx if needs[0] else None, dp, dq, dw, db, *(None,) * 15
