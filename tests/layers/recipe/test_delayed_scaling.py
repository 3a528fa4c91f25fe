"""Delayed scaling step by step: an emulation, compiled, resumed, in any order of passes, evaluated and recomputed."""

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import make_boxed_compiler
from torch.utils.checkpoint import checkpoint

import te_models.layers as te
from te_models.layers.recipe import recipe_use
from tests.layers.recipe.test_delayed_ranks import Experts

MAX = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


class Emulation:
    """The history and scale of one role in Python floats, as the definition says: roll, reduce, divide."""

    def __init__(self, fp8_max: float, recipe: te.DelayedScaling) -> None:
        self.fp8_max, self.recipe, self.scale = fp8_max, recipe, 1.0
        self.history = [0.0] * recipe.amax_history_len

    def update(self, amax: float) -> None:
        if amax == 0:
            return
        self.history = [amax, *self.history[:-1]]
        chosen = max(self.history) if self.recipe.amax_compute_algo == "max" else amax
        if math.isfinite(chosen) and chosen > 0:
            quotient = torch.tensor(self.fp8_max * 2.0**-self.recipe.margin) / torch.tensor(chosen)
            self.scale = min(float(quotient), torch.finfo(torch.float32).max)


@pytest.mark.parametrize(
    "recipe",
    [
        te.DelayedScaling(amax_history_len=3),
        te.DelayedScaling(amax_history_len=1, margin=2),
        te.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
    ],
    ids=["max", "margin", "most_recent"],
)
def test_histories_and_scales_follow_the_definition(recipe: te.DelayedScaling) -> None:
    layer = te.Linear(32, 16, bias=False, params_dtype=torch.bfloat16)
    emulated = {role: Emulation(value, recipe) for role, value in MAX.items()}
    pending = 0.0
    # sizes that fall again, so that the maximum leaves the history; an infinity and a zero gradient on the way
    for size in (1.0, 8.0, 0.5, 0.25, 0.125, float("inf"), 2.0, 1.0):
        x = torch.randn(8, 32, dtype=torch.bfloat16)
        x[0, 0] = size * 4
        with te.autocast(recipe=recipe):
            y = layer(x)
        emulated["input"].update(float(x.abs().max()))
        emulated["weight"].update(float(layer.weight.detach().abs().max()))
        emulated["grad_output"].update(pending)
        dy = torch.randn_like(y) * (0.0 if size == 0.5 else size if math.isfinite(size) else 1.0)
        y.backward(dy)
        pending = float(dy.abs().max())
        for row, role in enumerate(MAX):
            assert float(layer.fp8_scale[row, 0]) == emulated[role].scale, (size, role)
            assert layer.fp8_history[:, row, 0].tolist() == emulated[role].history[:-1], (size, role)
    assert emulated["input"].scale != 1 and emulated["grad_output"].scale != 1


@pytest.mark.sentinels("None-False")
@pytest.mark.parametrize(
    ("backend", "inside"),
    [
        (None, False),
        ("aot_eager", True),
        *(pytest.param("inductor", inside, marks=pytest.mark.slow) for inside in (False, True)),
    ],
)
def test_a_backward_pass_scales_by_the_gradients_of_the_one_before(backend: str | None, inside: bool) -> None:
    """Gradients of 2^-20 vanish in E5M2 unless they are scaled: in the first step only, wherever the region ends."""
    layer = te.Linear(16, 16, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(16))

    def run(x: Tensor) -> Tensor:
        with te.autocast(recipe=RECIPE) if inside else contextlib.nullcontext():
            return layer(x)

    run = torch.compile(run, fullgraph=True, backend=backend) if backend else run
    dy = torch.linspace(1, 2, 64).view(4, 16).to(torch.bfloat16) * 2.0**-20
    for factor, seen in ((1.0, 0.0), (2.0, 1.0), (0.5, 2.0)):
        x = torch.ones(4, 16, dtype=torch.bfloat16, requires_grad=True)
        with contextlib.nullcontext() if inside else te.autocast(recipe=RECIPE):
            y = run(x)
        y.backward(dy * factor)
        scale = torch.tensor(MAX["grad_output"]) / (seen * dy.max().float()) if seen else torch.tensor(1.0)
        scaled = (dy.float() * factor * scale).clamp(max=MAX["grad_output"]).to(torch.float8_e5m2).float()
        torch.testing.assert_close(x.grad.float(), scaled * (1 / scale), rtol=2.0**-7, atol=0)


def test_an_algorithm_may_be_a_function_of_the_history() -> None:
    recipe = te.DelayedScaling(amax_history_len=3, amax_compute_algo=lambda history: history.mean(0))
    layer = te.Linear(16, 16, bias=False)
    for size in (1.0, 3.0):
        with te.autocast(recipe=recipe):
            layer(torch.full((2, 16), size))
    assert float(layer.fp8_scale[0, 0]) == float(torch.tensor(448.0) / torch.tensor(4.0 / 3.0))
    with pytest.raises(TypeError, match="no JSON form"):
        recipe.to_json()


def test_a_failing_algorithm_leaves_no_recipe_in_force() -> None:
    def fails(history: Tensor) -> Tensor:
        raise ZeroDivisionError

    layer, x = te.Linear(16, 16), torch.randn(2, 16)
    with pytest.raises(ZeroDivisionError), te.autocast(recipe=te.DelayedScaling(amax_compute_algo=fails)):
        layer(x)
    assert te.current_recipe() is None
    with te.autocast(recipe=RECIPE):
        layer(x)  # an outermost region again: its exit updates
    assert layer.fp8_history is not None


def assert_same(state: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)


class MLP(nn.Module):
    """Two layers with an activation that is exact in every order of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = te.Linear(48, 64, bias=False), te.Linear(64, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


RECIPE = te.DelayedScaling(amax_history_len=8)


def train(model: MLP | Experts, run, steps: range, seen: list[Tensor]) -> None:
    """Do SGD steps, noting output, histories and scales of each."""
    for step in steps:
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(step)) * (1 + step % 7)
        with te.autocast(recipe=RECIPE):
            y = run(x)
        (y - x).square().mean().backward()
        layers = (model.up, model.down)
        seen += [y.detach(), *(t.clone() for layer in layers for t in (layer.fp8_scale, layer.fp8_history))]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None


@pytest.fixture
def rounding_as_eager() -> Iterator[None]:
    """Inductor keeps float32 between operations that it fuses, where eager bfloat16 rounds after each: not here."""
    with torch._inductor.config.patch(emulate_precision_casts=True):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("rounding_as_eager")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("build", [MLP, lambda: Experts(torch.bfloat16)], ids=["float32", "bfloat16 experts"])
def test_fifty_compiled_steps_with_a_resume_equal_eager_ones(
    build: Callable[[], MLP | Experts], backend: str, tmp_path: Path
) -> None:
    model = build()
    resumed_from = copy.deepcopy(model)
    eager: list[Tensor] = []
    train(model, model, range(50), eager)

    torch._dynamo.reset()
    compiled: list[Tensor] = []
    first = resumed_from
    train(first, torch.compile(first, fullgraph=True, backend=backend), range(23), compiled)
    save_file({k: v.contiguous() for k, v in first.state_dict().items()}, tmp_path / "state.safetensors")
    torch._dynamo.reset()
    second = build()
    second.load_state_dict(load_file(tmp_path / "state.safetensors"))
    train(second, torch.compile(second, fullgraph=True, backend=backend), range(23, 50), compiled)

    assert len(eager) == len(compiled) == 250
    for i, (a, b) in enumerate(zip(eager, compiled, strict=True)):
        torch.testing.assert_close(b, a, rtol=0, atol=0, msg=lambda text, i=i: f"step {i // 5}: {text}")
    assert len({float(s[0, 0]) for s in eager[1::5]}) > 10, "the scales of the test hardly move"


def passes(pattern: str, layer: te.Linear, run) -> list[Tensor]:
    torch.manual_seed(1)
    seen: list[Tensor] = []
    for _ in range(3):
        inputs, outputs = [torch.randn(8, 32) * (i + 1) for i in range(2)], []
        if pattern == "one region, then both backward passes":
            with te.autocast(recipe=RECIPE):
                outputs = [run(x) for x in inputs]
        else:
            for x in inputs:
                with te.autocast(recipe=RECIPE):
                    outputs.append(run(x))
                if pattern == "forward, backward":
                    outputs.pop().square().sum().backward()
        for y in outputs:
            y.square().sum().backward()
        seen += [layer.fp8_scale.clone(), layer.fp8_history.clone(), layer.fp8_grad_amax.clone()]
    return [*seen, layer.weight.grad]


@pytest.mark.sentinels("aot_eager-one region, then both backward passes")
@pytest.mark.parametrize(
    "pattern", ["forward, backward", "two regions, then both backward passes", "one region, then both backward passes"]
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradient_amaxes_count_whenever_backward_runs(pattern: str, backend: str) -> None:
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = te.Linear(32, 16, bias=False)
        run = torch.compile(layer, fullgraph=True, backend=backend) if compiled else layer
        results.append(passes(pattern, layer, run))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert float(results[0][-3][0, 2, 0]) > 0, "no gradient amax reached the history"


def test_the_larger_of_two_micro_batches_counts() -> None:
    layer = te.Linear(16, 8, bias=False)
    with te.autocast(recipe=RECIPE):
        y = layer(torch.ones(2, 16)), layer(torch.full((2, 16), 5.0))
    y[1].backward(torch.full((2, 8), 3.0))
    y[0].backward(torch.full((2, 8), 2.0))
    assert float(layer.fp8_grad_amax) == 3.0 and float(layer.fp8_history[0, 0, 0]) == 5.0


def test_the_backward_pass_uses_the_scale_its_forward_pass_saw() -> None:
    layer, x = te.Linear(16, 8, bias=False), torch.randn(4, 16)
    with te.autocast(recipe=RECIPE):
        y = layer(x)
    used = torch.ones(())  # the first step's scale; the region's exit has moved on since
    assert float(layer.fp8_scale[0, 0]) != 1
    dy = torch.randn_like(y)
    y.backward(dy)
    quantized = [(t * used).to(d).float() for t, d in ((dy, torch.float8_e5m2), (x, torch.float8_e4m3fn))]
    torch.testing.assert_close(layer.weight.grad, quantized[0].t() @ quantized[1], rtol=0, atol=0)


def test_a_history_of_another_length_is_cut_or_filled_up_with_zeros() -> None:
    layer = te.Linear(16, 8, bias=False)
    for size in (1.0, 2.0, 3.0):
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=3)):
            layer(torch.full((2, 16), size))
    assert layer.fp8_history[:, 0, 0].tolist() == [3.0, 2.0]
    assert layer.delayed_history(1)[:, 0, 0].tolist() == [3.0]
    assert layer.delayed_history(4)[:, 0, 0].tolist() == [3.0, 2.0, 0.0, 0.0]
    with te.autocast(recipe=te.DelayedScaling(amax_history_len=5)):
        layer(torch.full((2, 16), 1.0))
    assert layer.fp8_history[:, 0, 0].tolist() == [1.0, 3.0, 2.0, 0.0]
    assert float(layer.fp8_scale[0, 0]) == torch.tensor(448.0).div(3.0)


@pytest.mark.parametrize("recipe", [te.MXFP8BlockScaling(), RECIPE, None], ids=["mxfp8", "delayed", "none"])
def test_a_region_moves_only_the_layers_that_ran_in_it(recipe: te.Recipe | None) -> None:
    """Not another model's, whatever its recipe; nor its own where a layer was left out."""
    ran, other = te.Linear(16, 16), te.Linear(16, 16)
    with te.autocast(recipe=RECIPE):
        y = ran(torch.randn(2, 16))
    y.sum().backward()
    assert float(ran.fp8_grad_amax) == 1.0
    before = copy.deepcopy(te.recipe_state(ran))
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        other(torch.randn(2, 16)).sum().backward()
    assert_same(te.recipe_state(ran), before)
    assert (other.fp8_history is not None) == (recipe is RECIPE)
    with te.autocast(recipe=RECIPE):
        ran(torch.randn(2, 16))
    assert float(ran.fp8_history[0, 2, 0]) == 1.0, "the gradient of the earlier backward pass"


@pytest.mark.sentinels("False")
@pytest.mark.parametrize("compiled", [False, True])
def test_only_training_moves_the_state(compiled: bool) -> None:
    layer, x = te.Linear(16, 16), torch.randn(2, 16)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    with te.autocast(recipe=RECIPE):
        run(x).sum().backward()
    with te.autocast(recipe=RECIPE):
        run(x)
    before = copy.deepcopy(te.recipe_state(layer))
    for big in (x * 100, x * 1000):
        for region in (torch.no_grad, torch.inference_mode):
            layer.eval()
            with region(), te.autocast(recipe=RECIPE):
                run(big)
            layer.train()
        layer.eval()
        with te.autocast(recipe=RECIPE):
            run(big.clone().requires_grad_()).square().sum().backward()
        layer.train()
    assert_same(te.recipe_state(layer), before)
    # in training mode, but without gradients or left by an exception: amaxes are forgotten
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        run(x * 7)
    with contextlib.suppress(ZeroDivisionError), te.autocast(recipe=RECIPE):
        run(x * 5)
        raise ZeroDivisionError
    assert torch.equal(layer.fp8_history, before["fp8_history"])
    with te.autocast(recipe=RECIPE):
        te.Linear(16, 16)(x)  # the region of another model does not take them up
    assert torch.equal(layer.fp8_history, before["fp8_history"])
    with te.autocast(recipe=RECIPE):
        run(x)
    assert float(layer.fp8_history[0, 0, 0]) == float(x.abs().max())


def test_weights_cached_without_gradients_count() -> None:
    layer = te.Linear(16, 16)
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        te.cache_weights(layer)
    assert float(layer.fp8_history[0, 1, 0]) == float(layer.weight.detach().abs().max())
    assert float(layer.fp8_history[0, 0, 0]) == 0


def test_a_reentrant_checkpoint_moves_the_state() -> None:
    """Its first run has gradients switched off, and they are wanted all the same."""
    layer = te.Linear(16, 16)
    with te.autocast(recipe=RECIPE):
        checkpoint(layer, torch.full((2, 16), 3.0, requires_grad=True), use_reentrant=True)
    assert float(layer.fp8_history[0, 0, 0]) == 3.0


def test_training_after_evaluating_does_not_recompile() -> None:
    layers = nn.Sequential(te.Linear(16, 16), te.Linear(16, 16))
    counter = CompileCounter()
    run = torch.compile(layers, fullgraph=True, backend=counter)
    for _ in range(3):
        for training in (True, False):
            layers.train(training)
            with torch.set_grad_enabled(training), te.autocast(recipe=RECIPE):
                run(torch.randn(2, 16))
    assert counter.frame_count == 2


@pytest.mark.parametrize("calibrating", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_steps_go_on_after_a_region_in_inference_mode(training: bool, calibrating: bool) -> None:
    """The scales made at the exit of a calibration serve the next training step, which keeps them for its backward."""
    layer, x = te.Linear(16, 8, bias=False), torch.randn(4, 16)
    before, results = copy.deepcopy(layer.state_dict()), []
    for region in (torch.inference_mode, torch.no_grad):
        one = te.Linear(16, 8, bias=False).train(training)
        one.load_state_dict(before)
        with region(), te.autocast(enabled=not calibrating, calibrating=calibrating, recipe=RECIPE):
            one(x)
        assert (one.fp8_history is not None) == calibrating
        one.train()
        for _ in range(2):
            with te.autocast(recipe=RECIPE):
                y = one(x)
            y.sum().backward()
        results.append({name: value.clone() for name, value in te.recipe_state(one).items()} | {"dw": one.weight.grad})
        assert not any(value.is_inference() for value in te.recipe_state(one).values())
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("grouped", [False, True])
def test_calibration_runs_in_high_precision_and_sets_scales(grouped: bool) -> None:
    layer = te.GroupedLinear(2, 16, 8, bias=False) if grouped else te.Linear(16, 8, bias=False)
    layer.eval()
    x = torch.cat((torch.full((3, 16), 2.0), torch.full((4, 16), 7.0)))
    arguments = (x, torch.tensor([3, 4])) if grouped else (x,)
    with torch.no_grad():
        plain = layer(*arguments)
        with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
            calibrated = layer(*arguments)
    assert torch.equal(plain, calibrated)
    inputs = torch.tensor([2.0, 7.0] if grouped else [7.0])
    expected = torch.stack([inputs, layer.weight.detach().abs().amax((-2, -1)).view(-1)])
    assert torch.equal(layer.fp8_scale[:2], torch.tensor(448.0) / expected)  # a number by a tensor is rounded twice
    with te.autocast(enabled=False, calibrating=True, recipe=te.MXFP8BlockScaling()):
        assert torch.equal(layer(*arguments), plain)


@pytest.mark.parametrize("kind", ["linear", "grouped", "ops", "ops grouped"])
def test_calibrating_under_another_recipe_leaves_delayed_scaling_alone(kind: str) -> None:
    grouped = {"grouped": te.GroupedLinear, "ops grouped": te.ops.GroupedLinear}.get(kind)
    layer = grouped(2, 16, 16) if grouped else (te.Linear if kind == "linear" else te.ops.Linear)(16, 16)
    layer = te.ops.Sequential(layer) if kind.startswith("ops") else layer
    x, splits = torch.ones(4, 16), (torch.tensor([1, 3]),) if grouped else ()
    with te.autocast(recipe=RECIPE):
        layer(x, *splits)
    before = copy.deepcopy(te.recipe_state(layer))
    with te.autocast(enabled=False, calibrating=True, recipe=te.MXFP8BlockScaling()):
        layer(x * 1e6, *splits)
    assert_same(te.recipe_state(layer), before)


@pytest.mark.sentinels("False")
@pytest.mark.parametrize("compiled", [False, True])
def test_calibration_reaches_quantize(compiled: bool) -> None:
    model = te.ops.Sequential(te.ops.Quantize(), te.ops.Linear(16, 16)).eval()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    x = torch.linspace(-7e4, 5e4, 64).view(4, 16)
    with torch.no_grad():
        expected = model(x)
        with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
            assert torch.equal(run(x), expected)
        with te.autocast(recipe=RECIPE):
            y = run(x)
    assert float(model[0].fp8_scale[0, 0]) == float(torch.tensor(448.0) / 7e4)
    assert float((y - expected).norm() / expected.norm()) < 0.1


PLAIN = aot_autograd(fw_compiler=make_boxed_compiler(lambda graph, inputs: graph))
"""torch's autograd tracing without further options: what a forward pass writes to its inputs leaves the graph."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", PLAIN, "inductor"])
def test_a_region_inside_a_compiled_function(backend: str | Callable) -> None:
    """Its exit is in the graph; after it backward passes (B) of calls (F) come in any order, and the largest counts."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = te.Linear(32, 16, bias=False)

        def step(x: Tensor, layer: te.Linear = layer) -> Tensor:
            with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
                return layer(x)

        run = torch.compile(step, fullgraph=True, backend=backend) if compiled else step
        outputs, seen = [], []
        for i, what in enumerate("FBFBFBFFFBBBFFBFBFBBF"):
            if what == "B":
                outputs.pop(0).backward(torch.linspace(-1, 1, 128).view(8, 16) * 0.9**i)
            else:
                outputs.append(run(torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) * (i + 1)))
                seen += [layer.fp8_scale, layer.fp8_history]
        results.append([*seen, layer.fp8_grad_amax, outputs[-1].detach()])
        assert len({float(history[0, 2, 0]) for history in seen[1::2]}) > 5, "no gradient amax reached the history"
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_state_moves_by_name_and_refuses_what_does_not_fit() -> None:
    source, target = MLP(), MLP()
    with te.autocast(recipe=RECIPE):
        source(torch.randn(4, 48)).sum().backward()
    state = te.recipe_state(source)
    assert set(state) == {f"{n}.fp8_{k}" for n in ("up", "down") for k in ("scale", "amax", "grad_amax", "history")}
    te.load_recipe_state(target, state)
    assert all(torch.equal(value, te.recipe_state(target)[name]) for name, value in state.items())
    with pytest.raises(ValueError, match=r"left\.fp8_scale, which is not a layer"):
        te.load_recipe_state(target, {"left.fp8_scale": state["up.fp8_scale"]})
    with pytest.raises(ValueError, match=r"fp8_scale has shape \(3, 2\); expected \(3, 1\)"):
        te.load_recipe_state(target, {"up.fp8_scale": torch.ones(3, 2)})
    with pytest.raises(ValueError, match=r"fp8_scale has dtype torch.int64; expected torch.float32"):
        te.load_recipe_state(target, {"up.fp8_scale": torch.ones(3, 1, dtype=torch.int64)})


def test_training_goes_on_after_loading_in_inference_mode() -> None:
    source, target = MLP(), MLP()
    with te.autocast(recipe=RECIPE):
        source(torch.randn(4, 48)).sum().backward()
    with torch.inference_mode():
        target.load_state_dict(source.state_dict())
    assert_same(te.recipe_state(target), te.recipe_state(source))
    with te.autocast(recipe=RECIPE):
        target(torch.randn(4, 48)).sum().backward()


def test_a_module_may_be_freed_while_the_live_ones_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = te.Linear(8, 8)
    reference, freed = weakref.KeyedRef(layer, None, 10**9), weakref.KeyedRef(te.Linear(8, 8), None, 10**9 + 1)
    assert freed() is None, "freed between the two steps of listing"
    monkeypatch.setattr(recipe_use._layers, "valuerefs", lambda: [freed, reference])
    assert recipe_use.live_modules() == [layer]


def test_a_state_dict_loads_under_another_recipe_or_none() -> None:
    source = MLP()
    with te.autocast(recipe=RECIPE):
        source(torch.randn(4, 48)).sum().backward()
    state = source.state_dict()
    target = MLP()
    target.load_state_dict(state)  # strict: the recipe's state is expected where there is some
    x = torch.randn(4, 48)
    with te.autocast(recipe=te.MXFP8BlockScaling()):
        assert torch.equal(target(x), source(x))
    assert torch.equal(target.up.fp8_scale, source.up.fp8_scale), "another recipe has touched the state"
    plain = MLP()
    target.load_state_dict(plain.state_dict())  # a state without: weights change, histories stay
    assert torch.equal(target.up.fp8_scale, source.up.fp8_scale)
    with te.autocast(recipe=te.DelayedScaling(amax_history_len=20)):
        target(x)
    assert target.up.fp8_history.shape == (19, 3, 1)
