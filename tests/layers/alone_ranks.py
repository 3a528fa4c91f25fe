"""What each of the two processes of test_alone_ranks does: `python -m tests.layers.alone_ranks RESULTS BACKEND`,
with "none" for no compiled layer.

Both train; in between rank 0 does something on its own while rank 1 waits for a word from it, which never comes if
rank 0 waits for rank 1. Every rank writes the scales and histories of its layer as safetensors to RESULTS.<rank>.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import distributed_c10d

from te_models.layers import DelayedScaling, Linear, MXFP8BlockScaling, autocast

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
CASES: dict[str, Callable[[Linear], None]] = {
    "evaluate": evaluate,
    "another recipe": another_recipe,
    "without gradients": without_gradients,
    "fail": fail,
}


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
    return {"scales": torch.stack(scales), "histories": torch.stack(histories)}


def main(results: str, backend: str) -> None:
    """Run every case on this rank, eagerly and, but for "none", compiled by a backend."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    rank, found = dist.get_rank(), {}
    for case in CASES:
        for name, chosen in (("eager", None), ("compiled", backend))[: 1 if backend == "none" else 2]:
            for key, value in run(rank, case, chosen).items():
                found[f"{case}/{name}/{key}"] = value.contiguous()
    save_file(found, f"{results}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
