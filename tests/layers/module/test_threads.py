"""Threads: what one has put in force is nobody else's, and many at once compute what they compute one by one."""

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_models.layers as te
from te_models.kernels.compiling import compiling
from te_models.layers.module import recipe_state
from te_models.layers.recipe.activation_checkpoint import checkpointed
from te_models.layers.recipe.context import state
from te_models.layers.recipe.recipe_use import live_modules, register_layer
from tests.compare import refused
from tests.layers.matrix_recipes import fresh, graphs

MXFP8, CURRENT = te.MXFP8BlockScaling(), te.Float8CurrentScaling()
BY_NAME = te.PerModuleRecipe(default=MXFP8, rules=(("*up", "bf16"),))
OTHERWISE = te.PerModuleRecipe(default=CURRENT, rules=(("*up", MXFP8),))
NVFP4 = te.NVFP4BlockScaling(disable_stochastic_rounding=True)  # each pass would draw other bits
RECIPES = [None, CURRENT, te.Float8BlockScaling(), MXFP8, NVFP4, fresh("custom"), BY_NAME, OTHERWISE]


@pytest.fixture(autouse=True)
def _threads_take_turns() -> Iterator[None]:
    """Every few bytecodes, and nothing is left in force."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
    assert vars(state()) == vars(type(state())())


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Return what each function returns, all run at once, each in a thread of its own."""
    results: list[Any] = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def run(i: int) -> None:
        try:
            start.wait()
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def in_a_thread(function: Callable[[], Any]) -> Any:
    return in_threads(function)[0]


class Two(nn.Module):
    """Two layers that rules tell apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = te.Linear(32, 64, name="up"), te.Linear(64, 32, name="down")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def inputs(rows: int = 32) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()


def a_pass(run: Callable[[Tensor], Tensor], parameters: list[Tensor], recipe: te.Recipe | None) -> list[Tensor]:
    """Return the output and the gradients, which are added up nowhere."""
    x = inputs()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = run(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def times(count: int, function: Callable[[], Any]) -> Callable[[], list[Any]]:
    return lambda: [function() for _ in range(count)]


def as_one_by_one(
    run: Callable[[Tensor], Tensor], parameters: list[Tensor], count: int, recipes: list[te.Recipe | None]
) -> None:
    """One model in eight threads, under recipes without state."""
    passes = [lambda recipe=recipe: a_pass(run, parameters, recipe) for recipe in recipes]
    expected = [one() for one in passes]
    for several, alone in zip(in_threads(*(times(count, one) for one in passes)), expected, strict=True):
        for got in several:
            assert_same(got, alone)


def test_eight_threads_with_eight_recipes() -> None:
    model = Two()
    as_one_by_one(model, list(model.parameters()), 2, RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_eight_threads_compiled(backend: str) -> None:
    """One graph per recipe, whichever thread calls; threads compile none for the recipes of others."""
    model, recipes = Two(), RECIPES
    if backend == "eager":
        model, recipes = te.Linear(32, 32, name="up"), [None, MXFP8, BY_NAME, OTHERWISE] * 2
    compiled, parameters = torch.compile(model, fullgraph=True, backend=backend), list(model.parameters())
    kinds = recipes[: len(recipes) // 2] if backend == "eager" else recipes
    expected = [a_pass(compiled, parameters, recipe) for recipe in kinds]
    count = graphs()
    assert count == len(kinds)
    as_one_by_one(compiled, parameters, 3, recipes)
    for recipe, alone in zip(kinds, expected, strict=True):
        assert_same(a_pass(compiled, parameters, recipe), alone)
    # threads that ask torch at once for the same graph may be refused it, for no reason that torch finds afterwards
    # ("unexpected recompilation", torch 2.13): then it compiles one more
    assert graphs() <= count + len(recipes)


@pytest.mark.slow
def test_many_passes_of_a_larger_layer() -> None:
    layer = te.LayerNormMLP(32, 96, activation="swiglu", name="up")
    as_one_by_one(layer, list(layer.parameters()), 40, RECIPES)


@pytest.mark.slow
def test_threads_that_compile_at_once() -> None:
    """Each thread compiles its own model, under its own recipe, while others compile or run eagerly."""
    expected = [a_pass(model := Two(), list(model.parameters()), recipe) for recipe in RECIPES]

    def compile_or_not(i: int, recipe: te.Recipe | None) -> list[Tensor]:
        model = models[i]
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if i % 2 else model
        return a_pass(run, list(model.parameters()), recipe)

    models = [Two() for _ in RECIPES]
    got = in_threads(*(lambda i=i, r=r: compile_or_not(i, r) for i, r in enumerate(RECIPES)))
    for one, alone in zip(got, expected, strict=True):
        assert_same(one, alone)


def steps(model: nn.Module, recipe: te.Recipe | None, compiled: bool) -> list[Tensor]:
    """Return what three training steps with delayed scaling or random bits leave, in two micro-batches each."""
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    outputs = []
    for _ in range(3):
        for first in (True, False):
            with te.autocast(recipe=recipe), te.microbatch(first=None if compiled else first), te.collect_statistics():
                y = run(inputs())
            y.square().sum().backward()
            outputs.append(y.detach())
    noted = [torch.tensor(list(values.values())) for values in te.quantization_statistics(model).values()]
    return [*outputs, *(p.grad for p in model.parameters()), *noted]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_recipes_with_state_with_a_model_for_each_thread(compiled: bool) -> None:
    recipes = [te.DelayedScaling(), te.DelayedScaling(margin=1), fresh("nvfp4"), MXFP8]
    model = Two()
    expected = [steps(copy.deepcopy(model), recipe, compiled) for recipe in recipes]
    count = graphs()
    runs = [lambda recipe=recipe: steps(copy.deepcopy(model), recipe, compiled) for recipe in recipes]
    for got, alone in zip(in_threads(*runs), expected, strict=True):
        assert_same(got, alone)
    assert graphs() == count


def test_a_thread_begins_with_nothing_in_force() -> None:
    stored = te.quantized_model_init(recipe=CURRENT)
    with te.autocast(recipe=MXFP8), stored, te.microbatch(first=True), te.collect_statistics():
        found = in_a_thread(lambda: (te.current_recipe(), te.storage_recipe(), vars(state())))
        assert found == (None, None, vars(type(state())()))
        assert type(in_a_thread(lambda: te.Linear(32, 32)).weight) is nn.Parameter
        assert te.current_recipe() == MXFP8 and te.storage_recipe() == CURRENT


REGIONS: list[Callable[[], Any]] = [
    lambda: te.autocast(recipe=MXFP8),
    lambda: te.autocast(recipe=BY_NAME),
    lambda: te.autocast(enabled=False, calibrating=True, recipe=te.DelayedScaling()),
    lambda: te.autocast(enabled=False),
    lambda: te.microbatch(first=True),
    lambda: te.collect_statistics(),
    lambda: te.quantized_model_init(recipe=CURRENT),
]


def said() -> tuple[Any, ...]:
    s = state()
    return s.compute, s.calibrating, s.first_microbatch, s.statistics, s.storage, s.depth


def test_regions_end_in_any_order() -> None:
    """What is in force is what those still open say, in the order in which they were entered."""
    alone = {}
    for count in range(3):
        for chosen in itertools.permutations(range(len(REGIONS)), count):
            opened = [REGIONS[i]().__enter__() for i in chosen]
            alone[chosen] = said()
            for region in reversed(opened):
                region.__exit__(None, None, None)
    for chosen in itertools.permutations(range(len(REGIONS)), 3):
        for order in itertools.permutations(chosen):
            opened = {i: REGIONS[i]().__enter__() for i in chosen}
            for i in order:
                opened.pop(i).__exit__(None, None, None)
                assert said() == alone[tuple(opened)], (chosen, order, i)


def test_one_region_is_entered_twice_and_in_several_threads() -> None:
    region = te.autocast(recipe=MXFP8)

    def enter(inside: threading.Barrier) -> list[Any]:
        found = [te.current_recipe()]
        with region:
            inside.wait()
            found.append(te.current_recipe())
            with te.autocast(recipe=CURRENT), region:
                found.append(te.current_recipe())
            found.append(te.current_recipe())
        return [*found, te.current_recipe()]

    inside = threading.Barrier(4)
    for found in in_threads(*[lambda: enter(inside)] * 4):
        assert found == [None, MXFP8, MXFP8, MXFP8, None]


def test_threads_leave_one_region_at_once() -> None:
    """Each leaves its own entry, wherever the others' leaving moves it meanwhile."""
    region = te.autocast(recipe=MXFP8)

    def enter() -> set[Any]:
        found = set()
        for _ in range(500):
            with region:
                found.add(te.current_recipe())
            found.add(te.current_recipe())
        return found

    sys.setswitchinterval(1e-6)
    assert in_threads(*[enter] * 8) == [{None, MXFP8}] * 8


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_is_left_by_another_thread(region: Callable[[], Any]) -> None:
    """A generator may be finished by whichever thread drops it. It ends where it began, and nothing changes there."""
    opened = region().__enter__()

    def leave() -> None:
        with te.autocast(recipe=CURRENT):
            opened.__exit__(None, None, None)
            assert te.current_recipe() == CURRENT

    in_a_thread(leave)  # the fixture sees what is left here


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *((recipe, None) for recipe in (MXFP8, BY_NAME, te.DelayedScaling())),
        (OTHERWISE, "eager"),
        *(pytest.param(r, "aot_eager", marks=pytest.mark.slow) for r in (te.DelayedScaling(), MXFP8, BY_NAME)),
        pytest.param(te.DelayedScaling(), "inductor", marks=pytest.mark.slow),
    ],
)
def test_backward_runs_in_another_thread(recipe: te.Recipe, backend: str | None) -> None:
    """With the recipe of its forward pass, which ran an activation checkpoint, whatever is in force there."""
    results = []
    elsewhere = (lambda run: run(), in_a_thread, lambda run: in_a_thread(lambda: under_another(run)))

    def under_another(run: Callable[[], Any]) -> Any:
        with te.autocast(recipe=BY_NAME):
            return run()

    first = Two() if backend != "eager" else te.Linear(32, 32, name="up")

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return checkpointed(model, x)

    run = step if backend is None else torch.compile(step, fullgraph=True, backend=backend)
    for where in elsewhere:
        model, x = copy.deepcopy(first), inputs()
        with te.autocast(recipe=recipe):
            loss = run(model, x).square().sum()
        tensors = [x, *model.parameters()]
        results.append(where(lambda loss=loss, tensors=tensors: torch.autograd.grad(loss, tensors)))
    for got in results[1:]:
        assert_same(got, results[0])
    assert graphs() == (backend is not None)


def test_checkpoints_of_threads_do_not_mix() -> None:
    """Each notes what its own thread gives out, and one thread's recomputation is nobody else's."""
    models = [Two() for _ in range(4)]
    recipes = [te.DelayedScaling(), MXFP8, CURRENT, BY_NAME]

    def run(i: int) -> list[Tensor]:
        return a_pass(lambda x: te.checkpoint(models[i], x), list(models[i].parameters()), recipes[i])

    runs = [lambda i=i: run(i) for i in range(4)]
    expected = [one() for one in runs[1:]]
    for several, alone in zip(in_threads(*(times(4, one) for one in runs))[1:], expected, strict=True):
        for got in several:
            assert_same(got, alone)


def test_another_thread_compiles() -> None:
    """Eager code that runs meanwhile is none that is compiled: it keeps weights, and checkpoints note their recipe."""
    seen, model = [], Two()
    expected = a_pass(lambda x: te.checkpoint(model, x), list(model.parameters()), MXFP8)

    def meanwhile() -> list[Tensor]:
        seen.append(compiling())
        with te.autocast(recipe=MXFP8), te.microbatch(first=True):
            model.up(inputs())
        assert any(name.startswith("weight_cache") for name in vars(model.up))
        return a_pass(lambda x: te.checkpoint(model, x), list(model.parameters()), MXFP8)

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        seen.extend(in_threads(meanwhile))
        return graph

    torch.compile(lambda x: x.sin(), backend=backend, fullgraph=True)(torch.ones(3))
    assert seen[0] is False
    assert_same(seen[1], expected)


def test_compiling_is_known_while_tracing() -> None:
    def traced(x: Tensor) -> Tensor:
        return x + 1 if compiling() else x - 1

    assert torch.equal(torch.compile(traced, fullgraph=True, backend="eager")(torch.zeros(2)), torch.ones(2))
    assert torch.equal(traced(torch.zeros(2)), -torch.ones(2)) and not compiling()
    assert torch.export.export(nn.ReLU(), (torch.zeros(2),), strict=False) is not None and not compiling()


def test_rules_by_name_are_looked_up_for_each_thread() -> None:
    """By one thread for all, the last to enter a region would decide."""
    model, entered = Two(), threading.Barrier(2)

    def run(recipe: te.Recipe) -> Tensor:
        with te.autocast(recipe=recipe), torch.no_grad():
            entered.wait()
            return model(inputs())

    both = in_threads(lambda: run(BY_NAME), lambda: run(OTHERWISE))
    for got, recipe in zip(both, (BY_NAME, OTHERWISE), strict=True):
        with te.autocast(recipe=recipe), torch.no_grad():
            assert torch.equal(got, model(inputs()))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_delayed_scaling_refuses_one_model_in_two_threads(compiled: bool) -> None:
    """One layer has one history: recorded in two regions at once, its scales would be of neither."""
    model = te.Linear(32, 32, name="up")
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model

    def record() -> None:
        with te.autocast(recipe=te.DelayedScaling()):
            run(inputs()).sum().backward()

    refused = pytest.raises(RuntimeError, match="up records amaxes for DelayedScaling in autocast regions of two")
    with refused, te.autocast(recipe=te.DelayedScaling()):
        run(inputs())
        in_a_thread(record)
    record()
    in_a_thread(record)  # one after the other


def test_evaluation_in_another_thread_leaves_the_amaxes() -> None:
    """Its region ends with gradients off, where what was recorded in it is forgotten."""
    model = Two()
    with te.autocast(recipe=te.DelayedScaling()):
        model(inputs()).sum().backward()
        recorded = model.up.fp8_amax.clone()

        @torch.no_grad()
        def evaluate() -> None:
            with te.autocast(recipe=te.DelayedScaling()):
                copy.deepcopy(model).eval()(inputs())
                model.eval()(inputs())
                model.train()

        in_a_thread(evaluate)
        assert recorded.count_nonzero() == 2 and torch.equal(model.up.fp8_amax, recorded)
    assert torch.equal(model.up.fp8_history[0, :2], recorded)


def test_models_are_built_while_regions_end() -> None:
    """The live modules are listed at the end of each region."""

    def build() -> None:
        for _ in range(60):
            te.Linear(8, 8)

    def enter() -> None:
        for _ in range(60):
            with te.autocast(recipe=BY_NAME):
                assert isinstance(live_modules(), list)

    in_threads(build, enter, build, enter)


@pytest.mark.parametrize(
    "build", [lambda: te.Linear(8, 8), lambda: copy.deepcopy(te.Linear(8, 8))], ids=["new", "copied"]
)
def test_a_layer_is_live_when_it_has_its_state(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A region of another thread may end as soon as a layer is among the live ones."""
    met = []

    def register(layer: Any) -> int:
        ordinal = register_layer(layer)
        with te.autocast(recipe=BY_NAME):
            met.append(layer in live_modules())
        return ordinal

    monkeypatch.setattr(recipe_state, "register_layer", register)
    build()
    assert met and all(met)


def test_copies_for_data_parallel() -> None:
    """`nn.DataParallel` runs copies in threads. They compute where they need nothing but their numbers."""
    model = Two()

    def copies() -> Two:
        copied = Two()  # torch's own `replicate` puts copies of the parts into the whole, here without devices
        for name, layer in model.named_children():
            copied._modules[name] = layer._replicate_for_data_parallel()
            for parameter, value in layer.named_parameters():
                vars(copied._modules[name])[parameter] = value
        return copied

    with te.autocast(recipe=MXFP8), pytest.raises(RuntimeError, match=r"nn.DataParallel .* region inside the model's"):
        model.up._replicate_for_data_parallel()

    def run(module: nn.Module, recipe: te.Recipe | None, **arguments: Any) -> Tensor:
        with te.autocast(enabled=arguments.pop("enabled", recipe is not None), recipe=recipe, **arguments):
            return module(inputs())

    for recipe in (None, MXFP8, BY_NAME):
        assert torch.equal(in_a_thread(lambda recipe=recipe: run(copies(), recipe)), run(model, recipe))
    run(model, te.DelayedScaling())
    assert torch.equal(run(copies(), MXFP8), run(model, MXFP8))
    amax = model.up.fp8_amax.clone()
    for recipe in (te.DelayedScaling(), fresh("nvfp4")):
        with pytest.raises(RuntimeError, match=r"a copy made by nn.DataParallel keeps no state"):
            run(copies(), recipe)
    with pytest.raises(RuntimeError, match=r"a copy made by nn.DataParallel keeps no state, which a calibration needs"):
        run(copies(), te.DelayedScaling(), enabled=False, calibrating=True)
    with te.collect_statistics():
        refused(lambda: run(copies(), MXFP8), "and collect_statistics need; allowed: Distributed", error=RuntimeError)
    assert torch.equal(model.up.fp8_amax, amax)
