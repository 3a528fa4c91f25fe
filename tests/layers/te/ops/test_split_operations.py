"""Fusible operations split over two ranks are the whole ones: outputs and all gradients, from one seed."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_models.layers import autocast, ops, recipe
from te_models.layers.distributed.tensor_parallel import rank_part
from tests.compare import refused
from tests.ranks import everyones, on_ranks

RANKS, ROWS, HIDDEN, FFN = 2, 64, 128, 256


def build(split: bool, sequence: bool, basic: bool) -> ops.Sequential:
    torch.manual_seed(0)
    group: dict[str, Any] = {"tensor_parallel_group": dist.group.WORLD, "sequence_parallel": sequence} if split else {}
    column, row = ({**group, "tensor_parallel_mode": mode} if split else {} for mode in ("column", "row"))
    if basic:
        return ops.Sequential(ops.BasicLinear(HIDDEN, FFN, **column), ops.GELU(), ops.BasicLinear(FFN, HIDDEN, **row))
    return ops.Sequential(ops.Linear(HIDDEN, FFN, **column), ops.GELU(), ops.Linear(FFN, HIDDEN, **row))


@on_ranks(2)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [None, "mxfp8"])
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("basic", [False, True], ids=["linear", "basic"])
def test_split_operations_are_the_whole_ones(sequence: bool, basic: bool, name: str | None, compiled: bool) -> None:
    rank = dist.get_rank()
    whole, split = build(False, sequence, basic), build(True, sequence, basic)
    parameters = list(zip(whole.named_parameters(), split.parameters(), strict=True))
    for (_, full), part in parameters:
        dim = getattr(part, "partition_dim", None)
        if part.dim() == 1:  # biases start at zero; a row's is the sum of the ranks'
            full.data.normal_(generator=torch.Generator().manual_seed(7))
            part.data.copy_(full.data / RANKS if dim is None else rank_part(full.data, dim, rank, RANKS))
        assert torch.equal(part, full / RANKS if dim is None else rank_part(full, dim, rank, RANKS))
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(ROWS, HIDDEN, generator=generator) for _ in range(2))
    found = []
    for model, own in ((whole, False), (split, sequence)):
        part, gradient = (t.chunk(RANKS)[rank] if own else t for t in (x, dy))
        part = part.clone().requires_grad_()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled and model is split else model
        with autocast(enabled=name is not None, recipe=None if name is None else recipe(name)):
            y = run(part)
        y.backward(gradient)
        assert part.grad is not None
        found.append([torch.cat(everyones(t.detach())) if own else t.detach() for t in (y, part.grad)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    for (what, full), part in parameters:
        dim = getattr(part, "partition_dim", None)
        assert full.grad is not None and part.grad is not None
        expected = full.grad if dim is None else rank_part(full.grad, dim, rank, RANKS)
        torch.testing.assert_close(
            part.grad, expected, rtol=1e-4, atol=1e-3, msg=lambda text, what=what: f"{what}: {text}"
        )


@on_ranks(2)
def test_options_are_taken_and_refused() -> None:
    class Tracker:
        entered = 0

        @contextlib.contextmanager
        def fork(self):
            Tracker.entered += 1
            yield

    layer = ops.Linear(HIDDEN, FFN, tensor_parallel_mode="column", rng_state_tracker_function=Tracker)
    assert Tracker.entered == 1 and layer.weight.shape == (FFN // RANKS, HIDDEN) and layer.bias.shape == (FFN // RANKS,)
    assert layer.weight.tensor_model_parallel and layer.weight.partition_dim == 0
    for options, sentence in (
        ({"userbuffers_options": {"name": "qkv"}}, "userbuffers_options is {'name': 'qkv'}, which this library does n"),
        ({"tensor_parallel_mode": "both"}, "parallel_mode is 'both'; allowed: None, 'column', 'row'"),
    ):
        refused(lambda options=options: ops.BasicLinear(HIDDEN, FFN, **options), sentence)
