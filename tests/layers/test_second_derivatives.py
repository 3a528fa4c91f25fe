"""A second derivative through a quantized layer is an error; first ones, and those of high precision, are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_models.layers import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, Recipe, autocast, ops, recipe

SPLITS = torch.tensor([3, 0, 5])
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "Linear": (lambda: Linear(32, 16), ()),
    "LayerNormLinear": (lambda: LayerNormLinear(32, 16), ()),
    "LayerNormMLP": (lambda: LayerNormMLP(32, 48), ()),
    "GroupedLinear": (lambda: GroupedLinear(3, 32, 16), (SPLITS,)),
    "per GEMM": (lambda: GroupedLinear(3, 32, 16, single_grouped_weight=False), (SPLITS,)),
    "ops": (lambda: ops.Sequential(ops.BasicLinear(32, 16)), ()),
}


def gradient(name: str, chosen: Recipe | None, x: Tensor, *, create_graph: bool) -> tuple[nn.Module, Tensor]:
    """The gradient of x, and the layer with those of its parameters."""
    torch.manual_seed(0)
    build, arguments = LAYERS[name]
    layer = build()
    with autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x, *arguments)
    found = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], create_graph=create_graph)
    return layer, torch.cat([g.flatten() for g in found])


@pytest.mark.parametrize("recipe_name", ["delayed", "current", "block", "mxfp8", "nvfp4", "dequantized"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_second_derivative_is_refused(name: str, recipe_name: str) -> None:
    """A gradient penalty's own gradient was one of the rounded numbers, without a word."""
    chosen = recipe(recipe_name) if recipe_name != "dequantized" else recipe("mxfp8", backward_override="dequantized")
    x = torch.randn(8, 32, requires_grad=True)
    _, once = gradient(name, chosen, x, create_graph=False)
    _, found = gradient(name, chosen, x, create_graph=True)
    if recipe_name != "nvfp4":  # rounds with bits of the layer's own
        torch.testing.assert_close(found.detach(), once, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="a second derivative through a quantized layer does not exist"):
        found.square().sum().backward()


@pytest.mark.parametrize(
    "chosen", [None, recipe("mxfp8", backward_override="high_precision")], ids=["bf16", "override"]
)
def test_high_precision_has_one(chosen: Recipe | None) -> None:
    x = torch.randn(8, 32, requires_grad=True)
    layer, found = gradient("Linear", chosen, x, create_graph=True)
    found.square().sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("recipe_name", [None, "mxfp8"], ids=str)
def test_an_input_that_is_used_twice(recipe_name: str | None) -> None:
    """The two gradients are added in place, but for a gradient that will be differentiated."""
    torch.manual_seed(0)
    layer = ops.Sequential(ops.MakeExtraOutput(), ops.BasicLinear(32, 16))
    x, found = torch.randn(8, 32, requires_grad=True), []
    for create_graph in (False, True):
        with autocast(enabled=recipe_name is not None, recipe=recipe_name and recipe(recipe_name)):
            y, extra = layer(x)
        found += torch.autograd.grad(y.square().sum() + extra.square().sum(), [x], create_graph=create_graph)
    torch.testing.assert_close(found[1].detach(), found[0], rtol=0, atol=0)
    if recipe_name is None:
        found[1].square().sum().backward()
        assert torch.count_nonzero(layer[1].weight.grad) > 0
