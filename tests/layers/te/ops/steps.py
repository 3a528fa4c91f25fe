"""What the tests of operations share: one training step, repeatable under every recipe."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from te_models.layers import QuantizedModule, Recipe, autocast, recipe, set_rounding_seed

NAMES = [None, "delayed", "current", "block", "mxfp8", "nvfp4"]


def fresh(name: str | None) -> Recipe | None:
    """A new recipe object of this name, which rounds the same way in modules of other positions."""
    return None if name is None else recipe(name, **({"disable_stochastic_rounding": True} if name == "nvfp4" else {}))


def reset(model: nn.Module) -> None:
    """Start live state and gradients anew."""
    model.zero_grad()
    set_rounding_seed(model, 1)
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module.fp8_scale = torch.full_like(module.fp8_scale, 8.0)
            module.fp8_amax.zero_()
            module.fp8_grad_amax.zero_()
            module.fp8_history = None


def step(
    model: nn.Module,
    name: str | None,
    inputs: Sequence[Tensor],
    *,
    run: Callable | None = None,
    parameters: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return outputs, gradients of the inputs and of the parameters of one step. run: what to call for the model."""
    reset(model)
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    with autocast(enabled=name is not None, recipe=fresh(name)):
        found = (model if run is None else run)(*leaves)
    outputs = list(found) if isinstance(found, tuple) else [found]
    grads = [torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype) * (i + 1) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, grads)
    gradients = [t.grad for t in (*leaves, *(model.parameters() if parameters is None else parameters))]
    return [y.detach() for y in outputs] + [g for g in gradients if g is not None]


def assert_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """Bit for bit."""
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        torch.testing.assert_close(y, x, rtol=0, atol=0, msg=lambda text, i=i: f"tensor {i}: {text}")
