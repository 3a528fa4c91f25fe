"""Activation checkpointing in compiled models: the first call works under every recipe, nothing having run eagerly, the
recomputation repeats the first run's scales and random bits, and less is kept for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from te_models import GPTModel, compile_model
from te_models.layers import Linear, autocast, ops, recipe, recompute_contexts, set_rounding_seed
from te_models.training import PrecisionConfig
from te_models.training.step import make_loss_function
from tests.build import one_layer, tiny, tiny_moe, token_ids

# The compiler itself looks at the gradients of a compiled layer's inputs, which are not leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
NAMES = (None, "delayed", "current", "block", "mxfp8", "nvfp4")


def build(kind: str = "dense", *, recompute: bool = True) -> GPTModel:
    torch.manual_seed(0)
    config = one_layer(tiny_moe() if kind == "moe" else tiny(), hidden_size=64)
    model = GPTModel(config, activation_checkpointing=recompute)
    set_rounding_seed(model, 1)
    return model


def two_steps(model: GPTModel, name: str | None) -> list[list[Tensor]]:
    """Return loss and gradients of each. Scales and random bits change from step to step."""
    ids, steps = token_ids(2, 9), []
    for _ in range(2):
        model.zero_grad()
        with autocast(enabled=name is not None, recipe=name and recipe(name)):
            loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
        steps.append([loss.detach(), *(p.grad for p in model.parameters())])
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["whole", "block"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_first_call_compiles_and_computes_what_eager_does(kind: str, mode: str, name: str | None) -> None:
    model = build(kind)
    expected, got = two_steps(build(kind), name), two_steps(compile_model(model, mode, backend="aot_eager"), name)
    for a, b in zip(expected, got, strict=True):
        for x, y in zip(a, b, strict=True):
            # sums of float32 in another order
            assert (x - y).norm() <= 1e-5 * x.norm().clamp(min=1e-6)
    if name in ("delayed", "nvfp4"):  # the test would see the scales or the bits of another step
        assert (expected[0][1] - expected[1][1]).norm() > 0.01 * expected[0][1].norm()
    assert counters["stats"]["unique_graphs"] == (1 if mode == "whole" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "delayed"])
def test_the_training_step_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_models.training.step.backend_for", lambda model: "aot_eager")
    losses = []
    for compiled in (False, True):
        function = make_loss_function(build(), PrecisionConfig(recipe=name, dtype="fp32"), "cpu", compiled=compiled)
        loss, _ = function(token_ids(2, 9))
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "mxfp8", "nvfp4"])
def test_a_compiled_model_keeps_less(name: str | None) -> None:
    """Bytes that the one graph keeps for its backward pass, without the weights."""
    ids, kept = token_ids(8, 64), {}
    for recompute in (False, True):
        model = build(recompute=recompute)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        seen: dict[int, int] = {}

        def pack(tensor: Tensor, own: set[int] = own, seen: dict[int, int] = seen) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            autocast(enabled=name is not None, recipe=name and recipe(name)),
        ):
            loss = compiled(ids, labels=ids, return_logits=False).loss
        kept[recompute] = sum(seen.values())
        del loss
    assert kept[True] < 0.7 * kept[False], kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_operations_recompute_in_the_first_call_of_a_graph(name: str) -> None:
    def step(wrap: Callable[[ops.Sequential], Callable]) -> list[Tensor]:
        torch.manual_seed(0)
        model = ops.Sequential(ops.Linear(64, 64), ops.SiLU(), ops.Linear(64, 64), recompute=True)
        set_rounding_seed(model, 1)
        x = torch.randn(32, 64).requires_grad_()
        with autocast(recipe=recipe(name)):
            y = wrap(model)(x)
        y.sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in model.parameters())]

    compiled = step(lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(compiled, step(lambda model: model), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_an_eager_checkpoint_around_a_graph_is_refused(name: str) -> None:
    compiled = torch.compile(Linear(64, 64), fullgraph=True, backend="aot_eager")
    x = torch.randn(32, 64, requires_grad=True)
    with autocast(recipe=recipe(name)):
        compiled(x)  # outside it has a graph
    with autocast(recipe=recipe(name)), pytest.raises(Exception, match="compile the function that calls checkpoint"):
        checkpoint(compiled, x, use_reentrant=False, context_fn=recompute_contexts)
