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

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand

from .autocast import state
from .delayed import bind
from .kept import gradient_sides, keep, note_statistics
from .module import compute_dtype
from .quantized_module import QuantizedModule, check_format
from .quantized_tensor import QuantizedTensor
from .quantizer import IdentityQuantizer, Quantizer, Usage
from .recipe import GemmQuantizers
from .sides import Side, accumulate_product_, plain, product, side, side_of_fields, turned
from .wgrad import WeightGradient, run_wgrad

HIGH_PRECISION = GemmQuantizers(
    IdentityQuantizer(), IdentityQuantizer(), IdentityQuantizer(), backward_override="high_precision"
)

_USAGES: tuple[Usage, ...] = ("rowwise", "columnwise")  # of dy, for the gradients of x and of w


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
    if state().calibrating:
        module.calibrate("input", largest(x.flatten(0, -2)), gemm)
        module.calibrate("weight", largest(weight), gemm)
    if quantizers is None and options.wgrad is None:
        if isinstance(weight, QuantizedTensor):
            weight = weight.dequantize(dtype)
        return torch.nn.functional.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
    quantizers = quantizers or HIGH_PRECISION
    live = module.live_state(quantizers)
    rows = x.reshape(-1, x.shape[-1])
    main_grad = None if options.wgrad is None else options.wgrad.main_grad
    y = _Linear.apply(rows, weight, bias, cached, main_grad, *live, quantizers, options, gemm)
    return y.view(*x.shape[:-1], weight.shape[0])


def weight_side(
    weight: Tensor,
    quantizer: Quantizer,
    usage: Usage,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    gemm: int | None = None,
) -> Side:
    """Return a weight as a side of a GEMM: a stored one exactly as it is, a high-precision one quantized now.

    Raises ValueError where the stored format is not the recipe's.
    """
    if not isinstance(weight, QuantizedTensor):
        return side(bind(quantizer, scale, amax, "weight", gemm), weight, usage, dtype)
    check_format(weight, quantizer)
    weight.require_matrix("be the operand of a GEMM")
    return side_of_fields(weight.quantizer, weight.fields, usage, dtype, weight.matrix_shape)


def largest(x: Tensor) -> Tensor:
    """Return the amax of a tensor, [] for a matrix and [G] for G of them."""
    return q.amax(x.dequantize() if isinstance(x, QuantizedTensor) else x.detach())


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
        grad_amax: Tensor | None,
        statistics: Tensor | None,
        grad_statistics: Tensor | None,
        key: Tensor | None,
        quantizers: GemmQuantizers,
        options: GemmOptions,
        gemm: int,
    ) -> Tensor:
        stored = weight if cached is None else cached
        x_quantizer = bind(quantizers.input, scale, amax, "input", gemm)
        left, kept, tensors = keep(
            x_quantizer, x, quantizers.backward_override, options.save_original_input, ctx.needs_input_grad[1]
        )
        if statistics is not None:
            noted = statistics[gemm % statistics.shape[0]]
            note_statistics(noted[0], x_quantizer, x)
            if not isinstance(stored, QuantizedTensor):
                note_statistics(noted[1], bind(quantizers.weight, scale, None, "weight", gemm), stored)
        right = weight_side(stored, quantizers.weight, "rowwise", x.dtype, scale, amax, gemm)
        ctx.save_for_backward(weight, cached, scale, key, *tensors)
        # not saved: backward writes to them, also between the forward and the backward pass of another call
        ctx.main_grad, ctx.grad_amax, ctx.grad_statistics = main_grad, grad_amax, grad_statistics
        ctx.quantizers, ctx.kept, ctx.options, ctx.gemm = quantizers, kept, options, gemm
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtype = x.dtype
        return product(left, right, x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, cached, scale, key, *tensors = ctx.saved_tensors
        quantizers, kept, dtype, gemm, main_grad = ctx.quantizers, ctx.kept, ctx.dtype, ctx.gemm, ctx.main_grad
        override = quantizers.backward_override
        quantizer = IdentityQuantizer()
        if not override:
            quantizer = bind(quantizers.grad_output, scale, ctx.grad_amax, "grad_output", gemm)
            if ctx.grad_statistics is not None:
                noted = ctx.grad_statistics[gemm % ctx.grad_statistics.shape[0]]
                note_statistics(noted, bind(quantizers.grad_output, scale, None, "grad_output", gemm), dy, key)
        usages: tuple[Usage, ...] = tuple(u for u, needed in zip(_USAGES, ctx.needs_input_grad, strict=False) if needed)
        dy_sides = gradient_sides(quantizer, dy, usages, dtype, key)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            stored = weight if cached is None else cached
            if override == "high_precision":
                right = turned(Operand(plain_weight(weight, dtype), None), "columnwise")
            elif override == "dequantized":
                right = plain(weight_side(stored, quantizers.weight, "rowwise", dtype, scale, None, gemm), dtype)
                right = turned(Operand(scaled_values(right, dtype), None), "columnwise")
            else:
                right = weight_side(stored, quantizers.weight, "columnwise", dtype, scale, None, gemm)
            dx = product(dy_sides["rowwise"], right, dtype)
        if ctx.needs_input_grad[1]:
            left = dy_sides["columnwise"]
            right = kept.side(bind(quantizers.input, scale, None, "input", gemm), tensors, dtype)
            wgrad = ctx.options.wgrad

            def compute() -> Tensor | None:
                if main_grad is None:
                    return product(left, right, weight.dtype)
                accumulate_product_(main_grad, left, right, accumulate=not wgrad.overwrite)
                return None

            dw = run_wgrad(wgrad, weight, compute)
        if ctx.needs_input_grad[2]:
            db = dy.float().sum(0).to(ctx.bias_dtype)
        return dx, dw, db, *(None,) * 11


def scaled_values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return an operand's values, [..., R, C], with its scale [...] applied."""
    if operand.scale is None:
        return operand.values.to(dtype)
    return (operand.values.float() * operand.scale[..., None, None]).to(dtype)
