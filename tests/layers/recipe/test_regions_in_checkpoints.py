"""A region opened in a checkpointed function: gradients are those without a checkpoint, or one sentence refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_models.layers as te

BF16 = torch.bfloat16
Checkpointed = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
WAYS: dict[str, Checkpointed] = {
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "non-reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "with contexts": lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=te.recompute_contexts),
    "ours": te.checkpoint,
}
CUSTOM = te.CustomRecipe(qfactory=lambda role: te.MXFP8Quantizer())
RECIPES: dict[str, Any] = {name: te.recipe(name) for name in ("delayed", "current", "block", "mxfp8", "nvfp4")}
RECIPES["custom"] = CUSTOM
REFUSED = "called in torch.utils.checkpoint.checkpoint without context_fn"


def gradients(recipe: Any, run: Checkpointed) -> list[Tensor]:
    """Train three steps under a region inside of what is checkpointed; return all gradients."""
    torch.manual_seed(0)
    layers = nn.Sequential(te.Linear(64, 64, params_dtype=BF16), te.Linear(64, 64, params_dtype=BF16))
    te.set_rounding_seed(layers, 1)
    found = []

    def function(x: Tensor) -> Tensor:
        with te.autocast(recipe=recipe):
            return layers(x)

    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = ((2 + step) * torch.randn(32, 64, generator=generator)).to(BF16).requires_grad_()
        run(function, x).float().square().sum().backward()
        found += [x.grad, *(p.grad for p in layers.parameters())]
        layers.zero_grad()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_without_checkpointing(name: str, way: str) -> None:
    if way == "non-reentrant" and name in ("delayed", "nvfp4"):
        with pytest.raises(RuntimeError, match=REFUSED):
            gradients(RECIPES[name], WAYS[way])
        return
    expected = gradients(RECIPES[name], lambda f, x: f(x))
    assert all(torch.equal(a, b) for a, b in zip(gradients(RECIPES[name], WAYS[way]), expected, strict=True))


def test_evaluation_in_a_checkpoint_of_torch_reads_one_scale() -> None:
    layer = te.Linear(64, 64, params_dtype=BF16).eval()
    x = torch.randn(32, 64).to(BF16).requires_grad_()

    def function(x: Tensor) -> Tensor:
        with te.autocast(recipe=RECIPES["delayed"]):
            return layer(x)

    (expected,) = torch.autograd.grad(function(x).float().square().sum(), x)
    (found,) = torch.autograd.grad(checkpoint(function, x, use_reentrant=False).float().square().sum(), x)
    assert torch.equal(found, expected)
