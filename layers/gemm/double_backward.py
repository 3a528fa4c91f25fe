"""Second derivatives through quantized operands do not exist: rounding is a step function, whose own derivative is zero
or infinite. What a quantized backward pass returns can be used, but not differentiated again. Nor do they exist where a
backward pass reads a value that its autograd function made: nothing leads from there back to the inputs."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling

from ..recipe.base import BackwardOverride

_QUANTIZED = (
    "a second derivative through a quantized layer does not exist; allowed: autocast(enabled=False), or a recipe with "
    "backward_override='high_precision'"
)
_INSIDE = (
    "a second derivative goes through a value that one operation hands to the next of its group, which has none; "
    "allowed: torch.nn.Sequential, which runs each operation by itself"
)
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def first_derivative(
    gradient: Tensor | None, override: BackwardOverride | None, *depends_on: Tensor | None
) -> Tensor | None:
    """Return a gradient that a layer's backward pass computed; under `create_graph`, so that a backward pass through it
    raises RuntimeError. One that was computed in high precision throughout stays as it is.

    depends_on: tensors with a history that it was computed from, for `torch.autograd.grad`, because that goes only
    where its inputs are. A graph of the compiler has no second derivatives by itself.
    """
    if gradient is None or override == "high_precision":
        return gradient
    if not torch.is_grad_enabled() or compiling():
        return gradient
    return _once(gradient, _QUANTIZED, depends_on)


def made_inside(saved: Tensor, depends_on: Sequence[Tensor | None]) -> Tensor:
    """Return a tensor that an autograd function saved and had made itself from inputs with gradients, for a backward
    pass under `create_graph`: a backward pass that comes to it again raises RuntimeError, where it would end silently.
    depends_on: as for `first_derivative`."""
    return _once(saved, _INSIDE, depends_on) if saved.dtype in _WIDE else saved


def _once(value: Tensor, reason: str, depends_on: Sequence[Tensor | None]) -> Tensor:
    anchors = [t for t in depends_on if t is not None and t.requires_grad]
    anchors.append(torch.empty(0, device=value.device, requires_grad=True))
    return _Once.apply(value.detach(), reason, *anchors)


class _Once(torch.autograd.Function):
    """anchors: give the result a backward pass that raises RuntimeError with `reason`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, reason: str, *anchors: Tensor) -> Tensor:
        ctx.reason = reason
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise RuntimeError(ctx.reason)
