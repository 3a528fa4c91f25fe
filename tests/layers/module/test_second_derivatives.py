"""A second derivative through a quantized layer, or between operations of a group, is an error; others are not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
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
    layer, found = gradient("Linear", chosen, torch.randn(8, 32, requires_grad=True), create_graph=True)
    found.square().sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("recipe_name", [None, "mxfp8"], ids=str)
def test_an_input_that_is_used_twice(recipe_name: str | None) -> None:
    """The two gradients are added in place, but for a gradient that will be differentiated."""
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


SINGLE = {
    "linear": (lambda: ops.BasicLinear(8, 8), lambda op, x: F.linear(x, op.weight)),
    "silu": (ops.SiLU, lambda op, x: F.silu(x)),
    "norm": (lambda: ops.RMSNorm(8), lambda op, x: F.rms_norm(x, (8,), op.weight, op.eps)),
}


def of_penalty(run: Callable, x: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a gradient penalty beside a loss, as `torch.autograd.grad` gives them."""
    loss = run(x).square().sum()
    found = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
    return torch.autograd.grad(loss + sum(g.square().sum() for g in found), [x, *parameters])


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
@pytest.mark.parametrize("name", SINGLE)
def test_operations_by_themselves_have_one(name: str, shape: tuple[int, ...]) -> None:
    build, formula = SINGLE[name]
    operation, x = build(), torch.randn(shape, requires_grad=True)
    expected = of_penalty(lambda x: formula(operation, x), x, parameters := list(operation.parameters()))
    torch.testing.assert_close(of_penalty(operation, x, parameters), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_group_has_none_through_what_its_operations_hand_on(frozen: bool) -> None:
    """The value between two operations has no history: without a word, its share was missing."""
    model, x = ops.Sequential(ops.BasicLinear(8, 8), ops.SiLU()), torch.randn(6, 8, requires_grad=True)
    model.requires_grad_(not frozen)
    parameters = [] if frozen else [model[0].weight]
    with pytest.raises(RuntimeError, match="a second derivative goes through a value that one operation hands to"):
        of_penalty(model, x, parameters)
    apart = nn.Sequential(*model)
    expected = of_penalty(lambda x: F.silu(F.linear(x, model[0].weight)), x, parameters)
    torch.testing.assert_close(of_penalty(apart, x, parameters), expected, rtol=1e-5, atol=1e-5)


def test_what_is_computed_from_constants_alone_needs_none() -> None:
    norm, linear = ops.RMSNorm(8).requires_grad_(False), ops.BasicLinear(8, 4)
    model, x = ops.Sequential(norm, linear), torch.randn(6, 8)
    (found,) = torch.autograd.grad(model(x).square().sum(), [linear.weight], create_graph=True)
    found.square().sum().backward()
    (again,) = torch.autograd.grad(F.linear(norm(x), linear.weight).square().sum(), [linear.weight], create_graph=True)
    torch.testing.assert_close(linear.weight.grad, torch.autograd.grad(again.square().sum(), [linear.weight])[0])


@pytest.mark.parametrize("name", LAYERS)
def test_a_quantized_layer_is_refused_among_other_ways_too(name: str) -> None:
    """`torch.autograd.grad` goes only where its inputs are; with a loss beside the penalty that was no error."""
    build, arguments = LAYERS[name]
    layer, x = build(), torch.randn(8, 32, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with autocast(recipe=recipe("mxfp8")):
            return layer(x, *arguments)

    with pytest.raises(RuntimeError, match="a second derivative through a quantized layer does not exist"):
        of_penalty(run, x, list(layer.parameters()))
