"""What each of the two processes of test_split_operations does: `python -m tests.layers.te.ops.split_ranks RESULTS`.

Every case builds the same operations twice from one seed, whole and split, runs both on the same rows, and compares
outputs and all gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.layers import autocast, ops, recipe
from te_models.layers.distributed.tensor_parallel import rank_part
from tests.ranks import report_cases

RANKS, ROWS, HIDDEN, FFN = 2, 64, 128, 256


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def build(split: bool, sequence: bool, basic: bool) -> ops.Sequential:
    torch.manual_seed(0)
    group: dict[str, Any] = {"tensor_parallel_group": dist.group.WORLD, "sequence_parallel": sequence} if split else {}
    column, row = ({**group, "tensor_parallel_mode": mode} if split else {} for mode in ("column", "row"))
    if basic:
        return ops.Sequential(ops.BasicLinear(HIDDEN, FFN, **column), ops.GELU(), ops.BasicLinear(FFN, HIDDEN, **row))
    return ops.Sequential(ops.Linear(HIDDEN, FFN, **column), ops.GELU(), ops.Linear(FFN, HIDDEN, **row))


def split_operations_are_the_whole_ones(sequence: bool, basic: bool, name: str | None, compiled: bool) -> None:
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
        found.append([gathered(t.detach()) if own else t.detach() for t in (y, part.grad)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    for (what, full), part in parameters:
        dim = getattr(part, "partition_dim", None)
        assert full.grad is not None and part.grad is not None
        expected = full.grad if dim is None else rank_part(full.grad, dim, rank, RANKS)
        torch.testing.assert_close(
            part.grad, expected, rtol=1e-4, atol=1e-3, msg=lambda text, what=what: f"{what}: {text}"
        )


def options_are_taken_and_refused() -> None:
    import contextlib

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
        (
            {"userbuffers_options": {"name": "qkv"}},
            "userbuffers_options is {'name': 'qkv'}, which this library does not",
        ),
        ({"tensor_parallel_mode": "both"}, "parallel_mode is 'both'; allowed: None, 'column', 'row'"),
    ):
        try:
            ops.BasicLinear(HIDDEN, FFN, **options)
        except ValueError as error:
            assert sentence in str(error), error
        else:
            raise AssertionError(options)


CASES: dict[str, Callable[[], None]] = {
    f"{'basic' if basic else 'linear'}-{'sequence' if sequence else 'plain'}-{name}{'-compiled' if compiled else ''}": (
        lambda sequence=sequence, basic=basic, name=name, compiled=compiled: split_operations_are_the_whole_ones(
            sequence, basic, name, compiled
        )
    )
    for basic in (False, True)
    for sequence in (False, True)
    for name in (None, "mxfp8")
    for compiled in (False, True)
}
CASES["options"] = options_are_taken_and_refused


if __name__ == "__main__":
    report_cases(CASES, sys.argv[1])
