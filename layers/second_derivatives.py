"""Second derivatives through quantized operands do not exist: rounding is a step function, whose own derivative is zero
or infinite. What a quantized backward pass returns can be used, but not differentiated again."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .recipe import BackwardOverride


def first_derivative(gradient: Tensor | None, override: BackwardOverride | None) -> Tensor | None:
    """Return a gradient that a layer's backward pass computed; under `create_graph`, so that a backward pass through it
    raises RuntimeError. One that was computed in high precision throughout stays as it is.

    A graph of the compiler has no second derivatives by itself.
    """
    if gradient is None or override == "high_precision":
        return gradient
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return gradient
    return _Once.apply(torch.empty(0, device=gradient.device, requires_grad=True), gradient.detach())


class _Once(torch.autograd.Function):
    """anchor: makes the result one that has a backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise RuntimeError(
            "a second derivative through a quantized layer does not exist; allowed: autocast(enabled=False), or a "
            "recipe with backward_override='high_precision'"
        )
