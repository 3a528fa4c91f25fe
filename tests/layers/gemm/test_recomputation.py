"""Activation checkpoints under a recipe: with weights kept for a step, and inside each other, they change no bit."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import te_models.layers as te
from tests.layers.matrix_recipes import fresh

Run = Callable[..., Tensor]


def everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep all results, those of the bookkeeping included."""
    written = op._schema.is_mutable or any(r.alias_info for r in op._schema.returns)
    return CheckpointPolicy.PREFER_RECOMPUTE if written else CheckpointPolicy.MUST_SAVE


def once(function: Run, *inputs: Tensor, save: Any = None) -> Tensor:
    contexts = functools.partial(te.recompute_contexts, save)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)


class Blocks(nn.Module):
    """Four layers of all kinds. around: how the function of the last three is called, and of the last two in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = te.Linear(64, 64), te.Linear(64, 64)
        self.c, self.d = te.GroupedLinear(2, 64, 64), te.ops.Sequential(te.ops.LayerNorm(64), te.ops.Linear(64, 64))
        self.inner: Callable[..., Tensor] = lambda function, x: function(x)

    def last(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(x, torch.tensor([10, 22]))))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.inner(self.last, torch.tanh(self.a(x)))))


def train(around: Run, inner: Run, name: str, *, first: bool, statistics: bool = False) -> list[Tensor]:
    """Return the gradients, the recipe's state and the statistics of two steps of two micro-batches."""
    torch.manual_seed(0)
    model = Blocks()
    te.set_rounding_seed(model, 1)
    model.inner = inner
    found = []
    for step in range(2):
        model.zero_grad()
        for i in range(2):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + i)) * (1 + step + i)
            with (
                te.autocast(recipe=fresh(name)),
                te.microbatch(i == 0 if first else None),
                te.collect_statistics(statistics),
            ):
                y = around(model, x.requires_grad_())
            y.square().sum().backward()
            found += [x.grad, *(v.clone() for v in te.recipe_state(model).values())]
        found += [p.grad for p in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    return [*found, *(m.fp8_statistics for m in model.modules() if hasattr(m, "fp8_statistics"))]


def call(function: Run, *inputs: Tensor) -> Tensor:
    return function(*inputs)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=lambda text, i=i: f"{i}: {text}")


@pytest.mark.sentinels("delayed-nothing", "mxfp8-everything")
@pytest.mark.parametrize("save", [None, everything], ids=["nothing", "everything"])
@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4"])
def test_weights_kept_for_a_step_are_those_of_the_first_run(name: str, save: Any) -> None:
    """The recomputation quantizes them no second time: not with later scales, and not for the next micro-batches."""
    for statistics in (False, True):
        expected = train(call, call, name, first=True, statistics=statistics)
        got = train(functools.partial(once, save=save), call, name, first=True, statistics=statistics)
        assert_same(got, expected)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_checkpoints_in_a_checkpoint_repeat_the_first_run(name: str, first: bool) -> None:
    twice: Run = lambda function, *inputs: once(lambda *x: once(function, *x), *inputs)  # noqa: E731
    expected = train(call, call, name, first=first)
    for around, inner in ((once, once), (twice, twice)):
        assert_same(train(around, inner, name, first=first), expected)


@pytest.mark.parametrize("save", [None, everything], ids=["nothing", "everything"])
@pytest.mark.parametrize("kind", [te.Linear, te.ops.Linear])
def test_a_calibrated_pass_records_once(kind: type, save: Any) -> None:
    """The recomputation does the same operations, by whose number selective checkpointing finds what it kept."""
    found = []
    for around in (call, functools.partial(once, save=save)):
        torch.manual_seed(0)
        model = nn.Sequential(te.ops.Sequential(te.ops.Quantize(), kind(16, 16)))
        x = torch.linspace(-2, 3, 64).view(4, 16).requires_grad_()

        def with_amax(x: Tensor, model: nn.Module = model) -> Tensor:
            y = model(x)
            return y * y.abs().amax()

        with te.autocast(enabled=False, calibrating=True, recipe=fresh("delayed")):
            y = around(with_amax, x)
        before = [value.clone() for value in te.recipe_state(model).values()]
        y.sum().backward()
        assert_same(list(te.recipe_state(model).values()), before)
        found.append([y, x.grad, *before])
    assert_same(found[1], found[0])
    assert len(found[0]) > 2


def test_products_that_a_checkpoint_keeps_are_not_overwritten() -> None:
    """They are scaled out of place where something observes them."""
    layer = te.GroupedLinear(2, 32, 48)
    x, splits = torch.randn(32, 32).requires_grad_(), torch.tensor([16, 16])
    found = []
    for run in (layer, lambda *inputs: once(layer, *inputs, save=everything)):
        with te.autocast(recipe=fresh("current")):
            y = run(x, splits)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))))
    torch.testing.assert_close(*found, rtol=0, atol=0)
