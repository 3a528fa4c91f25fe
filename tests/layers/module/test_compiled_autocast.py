"""`torch.amp.autocast` around and inside compiled layers: eager's bits, and one graph for each state of a call."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_models.layers import GroupedLinear, LayerNormMLP, Linear, autocast, recipe
from tests.layers.matrix_recipes import NAMES, fresh, graphs

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Linear(64, 64),
    "mlp": lambda: LayerNormMLP(64, 96, activation="swiglu"),
    "grouped": lambda: GroupedLinear(2, 64, 64),
}
AUTOCAST: dict[str, Callable[[], torch.amp.autocast]] = {
    "off": lambda: torch.amp.autocast("cpu", enabled=False),
    "bfloat16": lambda: torch.amp.autocast("cpu", dtype=torch.bfloat16),
    "float16": lambda: torch.amp.autocast("cpu", dtype=torch.float16),
}
NESTED = [("bfloat16", "off"), ("bfloat16", "float16"), ("float16", "bfloat16"), ("off", "bfloat16")]
CASES = [(kind, name) for kind in LAYERS for name in (None, "mxfp8")]
DTYPES = {"off": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def arguments(kind: str, x: Tensor) -> tuple[Tensor, ...]:
    return (x, torch.tensor([20, 12])) if kind == "grouped" else (x,)


def gradients(layer: nn.Module, run: Callable[[Tensor], list[Tensor]], name: str | None) -> list[Tensor]:
    """Return the outputs and all gradients of a step."""
    layer.zero_grad()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with autocast(enabled=name is not None, recipe=name and recipe(name)):
        outputs = run(x)
    sum(y.float().square().sum() for y in outputs).backward()
    return [*(y.detach() for y in outputs), x.grad, *(p.grad for p in layer.parameters())]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("outer", "inner"), NESTED)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_regions_inside_a_graph(kind: str, name: str | None, outer: str, inner: str) -> None:
    """What follows an inner region is computed as what went before it."""
    layer = LAYERS[kind]()

    def run(x: Tensor) -> list[Tensor]:
        with AUTOCAST[outer]():
            first = layer(*arguments(kind, x))
            with AUTOCAST[inner]():
                second = layer(*arguments(kind, x))
            return [first, second, layer(*arguments(kind, x))]

    expected = gradients(layer, run, name)
    assert [y.dtype for y in expected[:3]] == [DTYPES[outer], DTYPES[inner], DTYPES[outer]]
    assert torch.equal(expected[0], expected[2]) and not torch.equal(expected[0], expected[1].to(expected[0].dtype))
    assert_same(gradients(layer, torch.compile(run, fullgraph=True, backend="aot_eager"), name), expected)
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_graph_called_in_regions(kind: str, name: str | None) -> None:
    """One graph for each dtype: a region left, disabled, repeated inside another or come back to is no new state."""
    layer = LAYERS[kind]()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")

    def run(module: Callable[..., Tensor]) -> Callable[[Tensor], list[Tensor]]:
        def call(x: Tensor) -> list[Tensor]:
            outputs = [module(*arguments(kind, x))]
            for outer, inner in NESTED:
                with AUTOCAST[outer]():
                    outputs.append(module(*arguments(kind, x)))
                    with AUTOCAST[inner]():
                        outputs.append(module(*arguments(kind, x)))
                    outputs.append(module(*arguments(kind, x)))
            return outputs

        return call

    expected = gradients(layer, run(layer), name)
    assert_same(gradients(layer, run(compiled), name), expected)
    assert graphs() == len(AUTOCAST)


@pytest.mark.parametrize("outer", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in NAMES if name is not None])
def test_a_recipe_computes_with_the_numbers_it_made(name: str, outer: str) -> None:
    """Operands that are exact only in another dtype are not rounded to that of the region, which says what goes in."""
    layer = Linear(64, 48)
    x = torch.randn(32, 64)
    with autocast(recipe=fresh(name)):
        expected = layer(x.to(DTYPES[outer]))
    layer.fp8_scale = torch.ones_like(layer.fp8_scale)
    with autocast(recipe=fresh(name)), AUTOCAST[outer]():
        got = layer(x)
    assert got.dtype == DTYPES[outer] and torch.equal(got, expected)


@pytest.mark.slow
def test_a_region_of_delayed_scaling_inside_is_one_graph() -> None:
    """The first call has no history to read and the others have one; layers that ran elsewhere get none of it."""
    graphs()
    torch.manual_seed(0)
    layer, bystander = Linear(64, 32), Linear(64, 32)
    eager = copy.deepcopy(layer)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with autocast(recipe=recipe("delayed", amax_history_len=4)):
            return model(x)

    compiled = torch.compile(functools.partial(step, layer), fullgraph=True, backend="aot_eager")
    for i in range(3):
        x, dy = (i + 1) * torch.randn(16, 64), torch.randn(16, 32)
        for function, model in ((functools.partial(step, eager), eager), (compiled, layer)):
            model.zero_grad()
            function(x).backward(dy)
        assert torch.equal(layer.weight.grad, eager.weight.grad)
        for name, value in eager.recipe_state().items():
            assert torch.equal(value, layer.recipe_state()[name]), name
    assert graphs() == 1 and "fp8_history" in layer.recipe_state()
    assert bystander.recipe_state() == {} and bystander.fp8_history is None
