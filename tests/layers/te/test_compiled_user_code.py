"""Users' functions with our layers between other operations compile to one graph with the bits of eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_models.layers as te
from tests.layers.matrix_recipes import graphs
from tests.layers.recipe.test_delayed_scaling import PLAIN
from tests.layers.te.ops.steps import NAMES, assert_equal, fresh, reset, step

HIDDEN = 64


class Mixed(nn.Module):
    """Every larger layer once, with operations of torch between them, and experts chosen by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(HIDDEN, HIDDEN, normalization="RMSNorm")
        self.attention = te.MultiheadAttention(HIDDEN, 4, attention_dropout=0.0, attn_mask_type="causal")
        self.gate = nn.Linear(HIDDEN, 2)
        self.experts = te.GroupedLinear(2, HIDDEN, HIDDEN)
        self.mlp = te.LayerNormMLP(HIDDEN, 96, activation="swiglu")
        self.block = te.TransformerLayer(HIDDEN, 96, 4, hidden_dropout=0.0, attention_dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.qkv(x)) * 0.5
        x = x + self.attention(F.layer_norm(x, (HIDDEN,)))
        rows = x.flatten(0, 1)
        chosen = self.gate(rows).argmax(-1)
        order = torch.argsort(chosen, stable=True)
        experts = self.experts(rows[order], F.one_hot(chosen, 2).sum(0))
        x = x + torch.zeros_like(rows).index_copy(0, order, F.silu(experts)).view_as(x)
        return self.block(x + self.mlp(x).clamp(-4, 4)).float().square().mean()


FAST = ("delayed",)  # the other recipes in `make test-all`: the same graph but for the casts
CASES = [
    *(
        pytest.param(name, PLAIN if name == "delayed" else "aot_eager", marks=() if name in FAST else pytest.mark.slow)
        for name in NAMES
    ),
    pytest.param("nvfp4", "inductor", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_layers_between_other_operations(name: str | None, backend: str | Callable) -> None:
    """By Inductor norms and softmax are sums in another order: the scalar agrees within float32."""
    model = Mixed()
    run = torch.compile(model, fullgraph=True, backend=backend)
    for seed in (1, 2):
        x = torch.randn(8, 3, HIDDEN, generator=torch.Generator().manual_seed(seed))
        expected, found = step(model, name, [x]), step(model, name, [x], run=run)
        if backend == "inductor":
            torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=0)
        else:
            assert_equal(expected, found)
    assert graphs() == 1


class Toy(nn.Module):
    """A layer whose forward opens its own region, and one that is left out of it."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.recipe = fresh(name)
        self.inner, self.outer = te.Linear(HIDDEN, HIDDEN), te.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        with te.autocast(self.recipe is not None, recipe=self.recipe):
            y = self.inner(x)
            with te.autocast(enabled=False):
                y = y + self.outer(torch.sin(y))
            return self.inner(y)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_module_opens_its_own_region(name: str | None) -> None:
    model, x = Toy(name), torch.randn(32, HIDDEN)
    run = torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(2):
        assert_equal(step(model, None, [x]), step(model, None, [x], run=run))
    assert graphs() == 1


def test_a_recipe_is_an_argument() -> None:
    """Another object of equal value is the same graph, another value one more."""
    layer, x = te.Linear(HIDDEN, HIDDEN), torch.randn(32, HIDDEN)

    def run(x: Tensor, recipe: te.Recipe) -> Tensor:
        with te.autocast(recipe=recipe):
            return torch.relu(layer(x))

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    seen = []
    for name in ("mxfp8", "mxfp8", "block", "mxfp8", "block"):
        assert torch.equal(compiled(x, te.recipe(name)), run(x, te.recipe(name)))
        seen.append(graphs())
    assert seen == [1, 1, 2, 2, 2]


@pytest.mark.slow
def test_nested_regions_of_two_recipes_around_and_inside() -> None:
    layer, x = te.Linear(HIDDEN, HIDDEN), torch.randn(32, HIDDEN)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        first = layer(x)
        with te.autocast(recipe=te.NVFP4BlockScaling(disable_stochastic_rounding=True)):
            second = layer(x)
        return first, second, layer(x)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for name in ("mxfp8", "current"):
        with te.autocast(recipe=te.recipe(name)):
            expected, found = run(x), compiled(x)
        assert_equal(expected, found)
        assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stored", "cached"])
def test_micro_batches_and_evaluation_of_quantized_weights(kind: str) -> None:
    """A user's step over cached or stored weights, in training and evaluation in turns: one graph each."""
    with te.quantized_model_init(enabled=kind == "stored", recipe=te.MXFP8BlockScaling()):
        model = nn.ModuleList([te.LayerNormMLP(HIDDEN, 96), te.Linear(HIDDEN, HIDDEN)])

    def run(x: Tensor) -> Tensor:
        return model[1](F.gelu(model[0](x))).sum()

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    found: list[list[Any]] = []
    for function in (run, compiled):
        reset(model)
        found.append([])
        for training in (True, False, True, False):
            model.train(training)
            with te.autocast(recipe=te.MXFP8BlockScaling()), torch.set_grad_enabled(training):
                if kind == "cached":
                    te.cache_weights(model)
                with te.microbatch(first=False if kind == "cached" else None):
                    losses = [function(torch.full((32, HIDDEN), float(i))) for i in range(2)]
            if training:
                sum(losses).backward()
            found[-1] += [loss.detach() for loss in losses]
        found[-1] += [p.grad.clone() for p in model.parameters()]
    assert_equal(*found)
    assert graphs() == 2
