"""The gradients of a function, derived from the function: so that a reference needs no second text for its backward
pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .compiling import compiling


def gradients_of(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of `function(*inputs)` in every input, given dy of its result; it runs again for that.

    For the backward pass of an autograd function, also under `create_graph` and inside of saved-tensor hooks.
    """
    if torch.compiler.is_compiling() and compiling():
        from torch._functorch.eager_transforms import _vjp_with_argnums

        # torch.func.vjp without its refusal of saved-tensor hooks: those around a call of the graph see what the
        # graph saves, and while it is traced nothing is saved
        return _vjp_with_argnums.__wrapped__(function, *inputs)[1](dy)  # type: ignore[attr-defined]
    # eagerly torch.func refuses saved-tensor hooks, but a training step may have them around its backward pass
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_() for t in inputs]
        y = function(*own)
    return torch.autograd.grad(y, own, dy, create_graph=again)


def keeping_inputs(function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """Return `function(*inputs)`, whose backward pass keeps the inputs alone and runs the function again: the same
    bits, without the intermediate results that autograd would save. For a norm in bfloat16 these take four times the
    memory of its input.

    For a cheap eager function: a compiler decides by itself what to keep. `torch.func` and forward-mode derivatives get
    the function itself.
    """
    if not (
        (torch.compiler.is_compiling() and compiling())
        or not torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        for x in inputs:
            if x is not None and x.requires_grad:
                return _KeepingInputs.apply(function, *inputs)
    return function(*inputs)


class _KeepingInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = list(ctx.saved_tensors)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]

        def of_wanted(*values: Tensor) -> Tensor:
            every = inputs.copy()
            for i, value in zip(wanted, values, strict=True):
                every[i] = value
            return ctx.function(*every)

        gradients: list[Tensor | None] = [None] * (1 + len(inputs))
        found = gradients_of(of_wanted, tuple(inputs[i] for i in wanted), dy)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[1 + i] = gradient
        return tuple(gradients)
