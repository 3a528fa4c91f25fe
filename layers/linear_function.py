"""`y = x w^T + b` in high precision or under a recipe: the one implementation behind every dense layer.

T rows, K in, N out. Under a recipe the three GEMMs are computed from quantized operands:

    fprop y = x w^T     x rowwise      w rowwise
    dgrad dx = dy w     dy rowwise     w columnwise
    wgrad dw = dy^T x   dy columnwise  x columnwise

The formula is plain Python around kernels on plain tensors, not one opaque operation per layer, so that the compiler
fuses the quantizations with the norms and activations around them. Live state (scales, amaxes, main gradients) comes
in as tensors and is written in place, in the forward and in the backward pass; nothing is hidden in objects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand, gemm, gemm_wgrad_accumulate_

from .delayed import bind
from .kept import keep, note_statistics
from .module import compute_dtype
from .quantized_module import QuantizedModule, check_format
from .quantized_tensor import QuantizedTensor
from .quantizer import IdentityQuantizer, Quantizer, Usage
from .recipe import GemmQuantizers
from .wgrad import WeightGradient, run_wgrad

HIGH_PRECISION = GemmQuantizers(
    IdentityQuantizer(), IdentityQuantizer(), IdentityQuantizer(), backward_override="high_precision"
)


class GemmOptions(NamedTuple):
    """How a module wants its gradients: see `Linear`."""

    save_original_input: bool = False
    wgrad: WeightGradient | None = None


DEFAULT_OPTIONS = GemmOptions()


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
    dtype = compute_dtype(x)
    x = x.to(dtype)
    quantizers = module.quantizers()
    if quantizers is None and options.wgrad is None:
        if isinstance(weight, QuantizedTensor):
            weight = weight.dequantize(dtype)
        return torch.nn.functional.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
    quantizers = quantizers or HIGH_PRECISION
    live = module.live_state(quantizers, gemm)
    rows = x.reshape(-1, x.shape[-1])
    main_grad = None if options.wgrad is None else options.wgrad.main_grad
    y = _Linear.apply(rows, weight, bias, cached, main_grad, *live, quantizers, options)
    return y.view(*x.shape[:-1], weight.shape[0])


def weight_operand(
    weight: Tensor, quantizer: Quantizer, usage: Usage, dtype: torch.dtype, scale: Tensor | None, amax: Tensor | None
) -> Operand:
    """Return a weight as the recipe's operand: a stored one exactly as it is, a high-precision one quantized now.

    Raises ValueError where the stored format is not the recipe's.
    """
    if not isinstance(weight, QuantizedTensor):
        return bind(quantizer, scale, amax, "weight").operand(weight, usage, dtype)
    check_format(weight, quantizer)
    return weight.operand(usage, dtype)


def _transposed(operand: Operand) -> Operand:
    return Operand(operand.values.t(), operand.scale)


def plain_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight's high-precision values."""
    return weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)


class _Linear(torch.autograd.Function):
    """x: [T, K] in the compute dtype; weight: [N, K] plain or quantized; bias: [N] or None."""

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
        statistics: Tensor | None,
        key: Tensor | None,
        quantizers: GemmQuantizers,
        options: GemmOptions,
    ) -> Tensor:
        stored = weight if cached is None else cached
        needs_wgrad = ctx.needs_input_grad[1]
        x_quantizer = bind(quantizers.input, scale, amax, "input")
        left, kept, tensors = keep(
            x_quantizer, x, quantizers.backward_override, options.save_original_input, needs_wgrad
        )
        if statistics is not None:
            note_statistics(statistics, "input", x_quantizer, x)
            if not isinstance(stored, QuantizedTensor):
                note_statistics(statistics, "weight", bind(quantizers.weight, scale, None, "weight"), stored)
        right = weight_operand(stored, quantizers.weight, "rowwise", x.dtype, scale, amax)
        ctx.save_for_backward(weight, cached, main_grad, scale, amax, statistics, key, *tensors)
        ctx.quantizers, ctx.kept, ctx.options = quantizers, kept, options
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtype = x.dtype
        return gemm(left, _transposed(right), x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, cached, main_grad, scale, amax, statistics, key, *tensors = ctx.saved_tensors
        quantizers, kept, dtype = ctx.quantizers, ctx.kept, ctx.dtype
        stored = weight if cached is None else cached
        dx = dw = db = None
        high_precision = quantizers.backward_override is not None
        quantizer = IdentityQuantizer() if high_precision else bind(quantizers.grad_output, scale, amax, "grad_output")
        if statistics is not None and not high_precision:
            note_statistics(
                statistics, "grad_output", bind(quantizers.grad_output, scale, None, "grad_output"), dy, key
            )
        if ctx.needs_input_grad[0]:
            if quantizers.backward_override == "high_precision":
                right = Operand(plain_weight(weight, dtype), None)
            elif quantizers.backward_override == "dequantized":
                right = weight_operand(stored, quantizers.weight, "rowwise", dtype, scale, None)
                right = Operand(_scaled(right, dtype), None)
            else:
                right = weight_operand(stored, quantizers.weight, "columnwise", dtype, scale, None)
            dx = gemm(quantizer.operand(dy, "rowwise", dtype, key), right, dtype)
        if ctx.needs_input_grad[1]:
            left = quantizer.operand(dy, "columnwise", dtype, key)
            right = kept.operand(bind(quantizers.input, scale, None, "input"), tensors, dtype)
            wgrad = ctx.options.wgrad

            def compute() -> Tensor | None:
                if main_grad is None:
                    return gemm(_transposed(left), right, weight.dtype)
                gemm_wgrad_accumulate_(main_grad, left.values, right.values, not wgrad.overwrite, factor(left, right))
                return None

            dw = run_wgrad(wgrad, weight, compute)
        if key is not None:
            key[1].add_(1)
        if ctx.needs_input_grad[2]:
            db = dy.float().sum(0).to(ctx.bias_dtype)
        return dx, dw, db, *(None,) * 8


def factor(left: Operand, right: Operand) -> Tensor | None:
    """Return the scale that two operands leave for the epilogue of their product."""
    if left.scale is None or right.scale is None:
        return left.scale if right.scale is None else right.scale
    return left.scale * right.scale


def _scaled(operand: Operand, dtype: torch.dtype) -> Tensor:
    values = operand.values if operand.scale is None else operand.values.float() * operand.scale
    return values.to(dtype)
