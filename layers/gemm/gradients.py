"""The three GEMMs of a layer under a recipe, as functions that know nothing of autograd.

T rows, K in, N out; in a layer of groups, every group of rows has its own weight. The operands are quantized:

    fprop y = x w^T     x rowwise      w rowwise
    dgrad dx = dy w     dy rowwise     w columnwise
    wgrad dw = dy^T x   dy columnwise  x columnwise

Live state (scales, amaxes, main gradients) comes in as tensors and is written in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantizer import Usage
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedStorage
from .double_backward import first_derivative
from .encode import NOTHING, OneMatrix, SavedForm, encode_input
from .product import GemmTarget, target
from .scaling import Scaling
from .weight import Weights, dgrad_weight, encode_weight, stacked
from .wgrad import run_wgrad


class Forms(NamedTuple):
    """How `gradients` reads the tensors that `fprop` saved, first of the input, then of the weight, and what the GEMMs
    take."""

    to: GemmTarget
    x: SavedForm = NOTHING
    weight: SavedForm = NOTHING


def fprop(
    x: Tensor | QuantizedStorage,
    weights: Weights,
    bias: Tensor | None,
    cached: QuantizedTensor | None,
    rows: OneMatrix,
    scaling: Scaling,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Forms, tuple[Tensor, ...]]:
    """Return (`x w^T + b` [T, N], how to read what is saved, what is saved).

    x: [T, K] in `dtype`, or already quantized by the input quantizer; cached: the weights quantized in an earlier
    micro-batch; rows: how the rows of x lie; bias: None in a layer of groups; needs: whether the gradients of x and of
    the weights will be wanted.
    """
    quantizers, options, _ = scaling.config
    to, weight = target(x.device, dtype), cached
    if weight is None:
        weight = weights[0] if rows.offsets is None else stacked(weights)
    if scaling.state.statistics is not None:
        scaling.record_statistics(x, weight, rows.offsets)
    saving = (quantizers.backward_override, options.save_original_input, needs[1])
    left = encode_input(x, scaling.for_input(records=True), rows, to, *saving)
    right = encode_weight(weight, scaling, to, needs[0])
    y = rows.fprop(left.operand, right.operand, dtype, bias)
    return y, Forms(to, left.form, right.form), (*left.tensors, *right.tensors)


def gradients(
    dy: Tensor,
    weights: Weights,
    cached: QuantizedTensor | None,
    main_grads: tuple[Tensor, ...],
    rows: OneMatrix,
    scaling: Scaling,
    forms: Forms,
    tensors: list[Tensor],
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """Return the gradients of x and of each weight of `fprop`, those that are needed and go to autograd.

    dy: [T, N]; main_grads: one for each weight that has a gradient, where the options want them; forms, tensors: from
    `fprop`.
    """
    quantizers, options, _ = scaling.config
    override, key, to = quantizers.backward_override, scaling.state.key, forms.to
    count = len(tensors) - len(forms.weight.names)
    quantizer = scaling.for_gradient(dy, rows.amax, rows.offsets)
    of_dy: dict[Usage, Any] = rows.for_both_gemms(quantizer, dy, to, key) if all(needs) else {}
    dx: Tensor | None = None
    dw: tuple[Tensor | None, ...] = (None,) * len(weights)
    if needs[0]:
        right = dgrad_weight(weights, cached, forms.weight, tensors[count:], rows, scaling, to)
        # the copy of dy ends with the call, before wgrad makes its own
        dx = rows.dgrad(
            of_dy["rowwise"] if of_dy else rows.operand(quantizer, dy, "rowwise", to.wide, key), right, to.dtype
        )
    if needs[1]:
        left = of_dy["columnwise"] if of_dy else rows.operand(quantizer, dy, "columnwise", to.wide, key)
        right = forms.x.input_operand(scaling, tensors[:count], rows, to)
        wgrad = options.wgrad

        def compute() -> tuple[Tensor | None, ...]:
            if main_grads:
                rows.accumulate_(main_grads, left, right, wgrad.each() if wgrad else ())
                return (None,) * len(weights)
            found = rows.wgrad(left, right, weights[0].dtype)
            return (found,) if found.dim() == weights[0].dim() else found.unbind(0)

        dw = run_wgrad(wgrad, weights, (left, right), compute)
    if not torch.is_grad_enabled():
        return dx, dw
    # of a backward pass that could itself be differentiated
    dw = tuple([first_derivative(gradient, override, dy, *tensors) for gradient in dw])
    return first_derivative(dx, override, dy, *weights), dw
