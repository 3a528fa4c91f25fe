"""The gradients of a function, derived from the function: backward passes of references, which are written once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .compiling import compiling


def gradients_of(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of `function(*inputs)` in every input, given dy of its result; it runs again for that.

    For the backward pass of an autograd function, also under `create_graph` and inside of saved-tensor hooks.
    """
    if compiling():
        from torch._functorch.eager_transforms import _vjp_with_argnums

        # torch.func.vjp without its refusal of saved-tensor hooks: those around a call of the graph see what the
        # graph saves, and while it is traced nothing is saved
        return _vjp_with_argnums.__wrapped__(function, *inputs)[1](dy)  # type: ignore[attr-defined]
    # eagerly torch.func refuses saved-tensor hooks, which a training step may have around its backward pass
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_() for t in inputs]
        y = function(*own)
    return torch.autograd.grad(y, own, dy, create_graph=again)
