"""What one rank does alone under delayed scaling waits for no other rank, and changes nothing of the training."""

import contextlib
import copy
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from te_models.layers import DelayedScaling, Linear, MXFP8BlockScaling, autocast
from tests.ranks import everyones, on_ranks

RECIPE = DelayedScaling(amax_history_len=4)


def evaluate(layer: Linear) -> None:
    """Evaluate the trained layer, as loggers do; and a copy of it, which stays alive."""
    for model in (layer, copy.deepcopy(layer)):
        KEPT.append(model)
        model.eval()
        with torch.no_grad(), autocast(recipe=RECIPE):
            model(torch.full((4, 32), 1000.0))
        with autocast(recipe=RECIPE):  # a forgotten no_grad
            model(torch.full((4, 32), 1000.0))
        model.train()


def another_recipe(layer: Linear) -> None:
    """Run another model, in training mode, under a recipe without a state."""
    with autocast(recipe=MXFP8BlockScaling()):
        Linear(32, 32)(torch.randn(4, 32)).sum().backward()


def without_gradients(layer: Linear) -> None:
    """Run another model in training mode, where no gradient is wanted."""
    for region in (torch.no_grad, torch.inference_mode):
        with region(), autocast(recipe=RECIPE):
            Linear(32, 32)(torch.randn(4, 32))


def fail(layer: Linear) -> None:
    """Leave a region by an exception after a layer has run."""
    with contextlib.suppress(ZeroDivisionError), autocast(recipe=RECIPE):
        Linear(32, 32)(torch.randn(4, 32))
        raise ZeroDivisionError


KEPT: list[Linear] = []
CASES: dict[str, Callable] = {f.__name__: f for f in (evaluate, another_recipe, without_gradients, fail)}


def run(rank: int, case: str, backend: str | None) -> dict[str, Tensor]:
    """Return the scales and histories of three steps with what rank 0 does alone in between."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Linear(32, 32)
    function = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    scales, histories = [], []
    for step in range(3):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step)) * (1 + 3 * rank + step)
        with autocast(recipe=RECIPE):
            y = function(x)
        y.square().sum().backward()
        scales.append(layer.fp8_scale)
        histories.append(layer.fp8_history)
        store, word = distributed_c10d._get_default_store(), f"{case} {backend} {step}"
        if rank == 0:
            CASES[case](layer)
            store.set(word, "done")
        else:
            store.wait([word], timedelta(seconds=120))
            store.delete_key(word)  # another test says it again
    return {"scales": torch.stack(scales), "histories": torch.stack(histories)}


@on_ranks(2)
@pytest.mark.parametrize("backend", [None, *(pytest.param(b, marks=pytest.mark.slow) for b in ("eager", "aot_eager"))])
def test_a_rank_may_do_something_alone(backend: str | None) -> None:
    """Eagerly, and compiled by a backend."""
    rank, own = dist.get_rank(), {}
    for case in CASES:
        for chosen in (None, backend)[: 1 if backend is None else 2]:
            for key, value in run(rank, case, chosen).items():
                own[case, chosen, key] = value
    first, second = everyones(own)
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} is not the same on both ranks"
        # three steps on equal data: whatever happened in between, and however it ran, left no trace
        assert torch.equal(value, first["another_recipe", None, name[-1]]), name
    newest = first["evaluate", None, "histories"][:, 0, 0, 0]
    assert 0 < float(newest.max()) < 1000, "an amax of the evaluation reached the history"
