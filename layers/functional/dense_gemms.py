"""The three GEMMs of a dense layer under a recipe, as functions that know nothing of autograd.

T rows, K in, N out. The operands are quantized:

    fprop y = x w^T     x rowwise      w rowwise
    dgrad dx = dy w     dy rowwise     w columnwise
    wgrad dw = dy^T x   dy columnwise  x columnwise

Live state (scales, amaxes, main gradients) comes in as tensors and is written in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand

from ..module.base import LiveState
from ..quantizer import Fields, IdentityQuantizer, Quantizer, Usage
from ..quantizer.delayed import bind, bind_gradient, value_of
from ..recipe.base import HIGH_PRECISION, GemmQuantizers
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedStorage
from .double_backward import first_derivative
from .gemm_operand import Side, accumulate_product_, plain, product, side, side_of_fields, turned
from .saved_input import Kept, gradient_sides, keep, keep_weight, note_statistics
from .weight_format import check_format, check_operands
from .wgrad import WeightGradient, run_wgrad

USAGES: tuple[Usage, ...] = ("rowwise", "columnwise")  # of dy, for the gradients of x and of w


class GemmOptions(NamedTuple):
    """How a module wants its gradients: see `Linear`."""

    save_original_input: bool = False
    wgrad: WeightGradient | None = None


DEFAULT_OPTIONS = GemmOptions()


class How(NamedTuple):
    """The constants of a layer's GEMMs. gemm: the column of the live state that is its own."""

    quantizers: GemmQuantizers
    options: GemmOptions = DEFAULT_OPTIONS
    gemm: int = 0


def dense_fprop(
    x: Tensor | QuantizedStorage,
    weight: Tensor,
    bias: Tensor | None,
    cached: QuantizedTensor | None,
    live: LiveState,
    how: How,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Kept, tuple[Tensor, ...]]:
    """Return (`x w^T + b` [T, N], how to read what is kept of x, what is kept).

    x: [T, K] in `dtype`, or already quantized by the input quantizer; weight: [N, K] plain or quantized; cached: the
    weight quantized in an earlier micro-batch; needs: whether the gradients of x and of the weight will be wanted.
    """
    quantizers, options, gemm = how
    stored = weight if cached is None else cached
    x_quantizer = bind(quantizers.input, live.scale, live.amax, "input", gemm)
    left, kept, tensors = keep(
        x_quantizer, x, dtype, quantizers.backward_override, options.save_original_input, needs[1]
    )
    if live.statistics is not None:
        noted = live.statistics[gemm % live.statistics.shape[0]]
        if isinstance(x, Tensor):  # statistics are those of the values before quantization
            note_statistics(noted[0], x_quantizer, x)
        if not isinstance(stored, QuantizedTensor):
            note_statistics(noted[1], bind(quantizers.weight, live.scale, None, "weight", gemm), stored)
    if quantizers is HIGH_PRECISION and isinstance(stored, QuantizedTensor):  # no recipe is in force that it has to fit
        stored = plain_weight(stored, dtype)
    right, fields = fprop_weight(stored, quantizers, dtype, live, needs[0], gemm)
    kept = replace(kept, weight_names=tuple(fields)) if fields else kept
    return product(left, right, dtype, bias), kept, (*tensors, *fields.values())


def fprop_weight(
    stored: Tensor, quantizers: GemmQuantizers, dtype: torch.dtype, live: LiveState, needs_dgrad: bool, gemm: int | None
) -> tuple[Side, Fields]:
    """Return a weight [..., N, K] as a side of fprop and what `dgrad_weight` may read of it, see `keep_weight`."""
    if isinstance(stored, QuantizedTensor):
        check_operands(stored, quantizers, needs_dgrad)
    if isinstance(stored, QuantizedTensor) or quantizers.backward_override:
        return weight_side(stored, quantizers.weight, "rowwise", dtype, live.scale, live.amax, gemm), {}
    return keep_weight(bind(quantizers.weight, live.scale, live.amax, "weight", gemm), stored, dtype, needs_dgrad)


def dgrad_weight(
    stored: Tensor, fields: Fields, quantizers: GemmQuantizers, dtype: torch.dtype, live: LiveState, gemm: int | None
) -> Side:
    """Return a weight as a side of dgrad: the fields that fprop kept, or quantized now."""
    if not fields:
        return weight_side(stored, quantizers.weight, "columnwise", dtype, live.scale, None, gemm)
    value = value_of(bind(quantizers.weight, live.scale, None, "weight", gemm))
    return side_of_fields(value, fields, "columnwise", dtype, stored.shape)


def dense_gradients(
    dy: Tensor,
    weight: Tensor,
    cached: QuantizedTensor | None,
    main_grad: Tensor | None,
    live: LiveState,
    how: How,
    kept: Kept,
    tensors: list[Tensor],
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight of `dense_fprop`, each if needed, the latter if it goes to autograd.

    dy: [T, N]; main_grad: where the options want the weight gradient; kept, tensors: from `dense_fprop`.
    """
    quantizers, options, gemm = how
    override, scale, key = quantizers.backward_override, live.scale, live.key
    of_x, weight_fields = kept.parts(tensors)
    quantizer = IdentityQuantizer()
    if not override:
        quantizer = bind_gradient(quantizers.grad_output, live.gradient, gemm)
        if live.grad_statistics is not None:
            noted = live.grad_statistics[gemm % live.grad_statistics.shape[0]]
            note_statistics(noted, bind_gradient(quantizers.grad_output, live.gradient, gemm, record=False), dy, key)
    usages: tuple[Usage, ...] = tuple(u for u, needed in zip(USAGES, needs, strict=True) if needed)
    dy_sides = gradient_sides(quantizer, dy, usages, dtype, key)
    dx = dw = None
    if needs[0]:
        stored = weight if cached is None else cached
        if override == "high_precision":
            right = turned(Operand(plain_weight(weight, dtype), None), "columnwise")
        elif override == "dequantized":
            right = plain(weight_side(stored, quantizers.weight, "rowwise", dtype, scale, None, gemm), dtype)
            right = turned(Operand(scaled_values(right, dtype), None), "columnwise")
        else:
            right = dgrad_weight(stored, weight_fields, quantizers, dtype, live, gemm)
        dx = product(dy_sides["rowwise"], right, dtype)
    if needs[1]:
        left = dy_sides["columnwise"]
        right = kept.side(bind(quantizers.input, scale, None, "input", gemm), of_x, dtype)
        wgrad = options.wgrad

        def compute() -> tuple[Tensor | None]:
            if main_grad is None:
                return (product(left, right, weight.dtype),)
            accumulate_product_(main_grad, left, right, accumulate=not (wgrad and wgrad.overwrite))
            return (None,)

        (dw,) = run_wgrad(wgrad, (weight,), (left, right), compute)
    return first_derivative(dx, override, dy, weight), first_derivative(dw, override, dy, *tensors)


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a bias [N] from dy [..., N], summed in float32."""
    return dy.reshape(-1, dy.shape[-1]).float().sum(0).to(dtype)


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


def plain_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight's high-precision values."""
    return weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)


def scaled_values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return an operand's values, [..., R, C], with its scale [...] applied."""
    if operand.scale is None:
        return operand.values.to(dtype)
    return (operand.values.float() * operand.scale[..., None, None]).to(dtype)
