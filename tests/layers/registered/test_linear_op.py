"""A whole linear layer as one boundary: real against fake in every combination, and the numbers of `Linear`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from te_models.kernels.custom_op import differentiable, registered
from te_models.layers import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    autocast,
    collect_statistics,
    quantized_model_init,
)
from te_models.layers.functional.dense_gemms import GemmOptions
from te_models.layers.functional.wgrad import WeightGradient
from tests.kernels.described import Calls, check_description
from tests.layers.module.test_compile_claims import nodes_of, reachable
from tests.layers.quantizer.examples import EXAMPLES
from tests.layers.registered.linear_op import library_linear, linear_backward, linear_forward, linear_op

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROWS, IN, OUT = 40, 64, 48
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "hybrid": CustomRecipe(qfactory=lambda role: EXAMPLES["hybrid"]),
    "kept as it is": MXFP8BlockScaling(backward_override="high_precision"),
    "dequantized": NVFP4BlockScaling(backward_override="dequantized"),
}
WEIGHTS = ("plain", "stored", "cached")


def layer_of(recipe: Recipe, weights: str = "plain", dtype: torch.dtype = torch.bfloat16) -> Linear:
    torch.manual_seed(0)
    with quantized_model_init(enabled=weights == "stored", recipe=recipe):
        return Linear(IN, OUT, params_dtype=dtype, name="layer")


def step(boundary: Any, recipe: Recipe, layer: Linear, weights: str, x: Tensor, options: Any = None) -> list[Any]:
    """Return y, the gradients and the amaxes of one pass."""
    extra = {} if options is None else {"options": options}
    generator = torch.Generator().manual_seed(1)
    with autocast(recipe=recipe):
        cached = layer.cached_weight((layer.weight,), True, 0) if weights == "cached" else None
        y = boundary(layer, x, layer.weight, layer.bias, cached=cached, **extra)
        amax = layer.fp8_amax.clone()
    if y.requires_grad:
        y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad, amax, layer.fp8_grad_amax]


def inputs(dtype: torch.dtype = torch.bfloat16, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, IN, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", RECIPES)
def test_real_and_fake_agree(name: str, weights: str) -> None:
    """Forward and backward, for every combination of gradients that are wanted."""
    layer = layer_of(RECIPES[name], weights)
    seen = set()
    for needs in itertools.product((True, False), repeat=3):
        x = inputs().requires_grad_(needs[0])
        layer.weight.requires_grad_(needs[1])
        layer.bias.requires_grad_(needs[2])
        with Calls() as calls:
            step(linear_op, RECIPES[name], layer, weights, x)
        for op, arguments in calls.found:
            seen.add(op)
            check_description(registered()[op], arguments)
    assert seen == {"test_linear", "test_linear_backward"}


@pytest.mark.parametrize("options", ["save_original_input", "main_grad", "statistics"])
@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_real_and_fake_agree_with_options(name: str, options: str) -> None:
    layer, x = layer_of(RECIPES[name]), inputs().requires_grad_()
    main_grad = torch.zeros(OUT, IN)
    chosen = {
        "save_original_input": GemmOptions(save_original_input=True),
        "main_grad": GemmOptions(wgrad=WeightGradient(main_grad)),
        "statistics": GemmOptions(),
    }[options]
    with Calls() as calls, collect_statistics(options == "statistics"):
        found = step(linear_op, RECIPES[name], layer, "plain", x, chosen)
    for op, arguments in calls.found:
        check_description(registered()[op], arguments)
    layer, x = layer_of(RECIPES[name]), inputs().requires_grad_()
    written, statistics = main_grad.clone(), layer.fp8_statistics.clone()
    main_grad.zero_()
    with collect_statistics(options == "statistics"):
        assert_same(found, step(library_linear, RECIPES[name], layer, "plain", x, chosen))
    assert torch.equal(written, main_grad) and bool(main_grad.any()) is (options == "main_grad")
    assert torch.equal(statistics, torch.zeros_like(statistics))


@pytest.mark.parametrize(
    ("needs", "weights"),
    [((True, True, True), "plain"), ((True, False, False), "stored"), ((False, True, False), "plain")],
)
@pytest.mark.parametrize("name", ["current", "nvfp4", "delayed"])
def test_opcheck(name: str, needs: tuple[bool, ...], weights: str) -> None:
    layer = layer_of(RECIPES[name], weights)
    for parameter, needed in zip((layer.weight, layer.bias), needs[1:], strict=True):
        parameter.requires_grad_(needed)
    with Calls() as calls:
        step(linear_op, RECIPES[name], layer, weights, inputs().requires_grad_(needs[0]))
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = {"test_linear": linear_forward, "test_linear_backward": linear_backward}
    for op, arguments in calls.found:
        torch.library.opcheck(ops[op], arguments, test_utils=checks)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got is None) is (want is None)
        assert got is None or torch.equal(got, want)


FAST = {("delayed", "plain"), ("nvfp4", "cached")}
COMPILED = [
    pytest.param(name, weights, how, marks=() if how == "aot_eager" and (name, weights) in FAST else pytest.mark.slow)
    for name, weights, how in itertools.product(RECIPES, WEIGHTS, ("aot_eager", "inductor"))
]


@pytest.mark.parametrize(("name", "weights", "how"), [*itertools.product(RECIPES, WEIGHTS, ("eager",)), *COMPILED])
def test_numbers_are_those_of_the_layer(name: str, weights: str, how: str) -> None:
    """Bit for bit, two steps one after the other: the second one of delayed scaling uses the first one's amaxes."""

    def two_steps(boundary: Any) -> list[Any]:
        layer, found = layer_of(RECIPES[name], weights), []
        for _ in range(2):
            x = inputs().requires_grad_()
            found += [None if t is None else t.clone() for t in step(boundary, RECIPES[name], layer, weights, x)]
        return found

    run = linear_op if how == "eager" else torch.compile(linear_op, fullgraph=True, backend=how)
    assert_same(two_steps(run), two_steps(library_linear))


def test_what_is_kept_of_x_is_quantized() -> None:
    """Only the copy that wgrad reads, not x; and the pass keeps no recipe."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer, x = layer_of(RECIPES["mxfp8"]), inputs().requires_grad_()
        with autocast(recipe=RECIPES["mxfp8"]):
            y = linear_op(layer, x, layer.weight, layer.bias)
    kept = [(t.dtype, tuple(t.shape)) for t in saved]
    assert (torch.float8_e4m3fn, (ROWS, IN)) in kept and (torch.uint8, (ROWS // 32 + 1, IN)) in kept
    assert (x.dtype, (ROWS, IN)) not in kept and len(kept) == 3  # and the weight
    nodes = [node for node in nodes_of(y) if hasattr(node, "saved_tensors")]
    found = reachable([vars(node) for node in nodes])
    assert len(found) > 3 and not [item for item in found if isinstance(item, Recipe)]
    assert not [a for a in linear_backward._opoverload._schema.arguments if "recipe" in a.name]


def test_without_gradients_nothing_is_kept() -> None:
    layer = layer_of(RECIPES["mxfp8"])
    with Calls() as calls, torch.no_grad():
        step(linear_op, RECIPES["mxfp8"], layer, "plain", inputs().requires_grad_())
    ((_, arguments),) = calls.found
    assert arguments[-1] == [False, False, False]


@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4"])
def test_new_token_counts_and_equal_recipes_recompile_nothing(name: str) -> None:
    layer, counter = layer_of(RECIPES[name]), CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def run(x: Tensor) -> Tensor:
        return linear_op(layer, x, layer.weight, layer.bias)

    for rows in (40, 17, 33):
        with autocast(recipe=Recipe.from_dict(RECIPES[name].to_dict())):
            assert run(inputs(rows=rows).requires_grad_()).shape == (rows, OUT)
    assert counter.frame_count == 1


def test_pairs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TypeError, match="test_linear has no parameter dy"):
        differentiable(linear_forward, linear_backward, gradients=("dy",))
    with pytest.raises(TypeError, match=r"test_linear_backward returns .* returns a NamedTuple"):
        differentiable(linear_backward, linear_forward, gradients=("dy",))
