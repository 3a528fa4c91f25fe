"""What each of the two processes of test_delayed_ranks does: `python -m tests.layers.delayed_ranks RESULTS`.

Each rank trains on inputs of its own scale, eagerly and compiled, with and without the reduction of amaxes, and writes
the histories and scales of its layer as safetensors to RESULTS.<rank>.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from te_models.layers import DelayedScaling, Linear, autocast

STEPS = 50


def run(rank: int, *, compiled: bool, recipe: DelayedScaling, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return every step's output, scale and history, and the amaxes this rank saw."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Linear(32, 16, bias=False)
    function = torch.compile(layer, fullgraph=True) if compiled else layer
    outputs, scales, histories, amaxes = [], [], [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 32, generator=generator) * (1 + (step + 3 * rank) % 5)
        with autocast(recipe=recipe, amax_reduction_group=group):
            y = function(x)
        dy = torch.randn(8, 16, generator=generator) * (1 + (step + 2 * rank) % 4)
        y.backward(dy)
        layer.weight.grad = None
        outputs.append(y.detach())
        scales.append(layer.fp8_scale)
        histories.append(layer.fp8_history)
        amaxes.append(torch.stack([t.detach().abs().max() for t in (x, layer.weight, dy)]))
    named = {"outputs": outputs, "scales": scales, "histories": histories, "amaxes": amaxes}
    return {name: torch.stack(values) for name, values in named.items()}


def main(results: str) -> None:
    """Run every case on this rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=240))
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    cases = {
        "eager": (False, DelayedScaling(amax_history_len=4), None),
        "compiled": (True, DelayedScaling(amax_history_len=4), None),
        "own group": (False, DelayedScaling(amax_history_len=4), alone),
        "no reduction": (False, DelayedScaling(amax_history_len=4, reduce_amax=False), None),
    }
    found = {}
    for name, (compiled, recipe, group) in cases.items():
        for key, value in run(rank, compiled=compiled, recipe=recipe, group=group).items():
            found[f"{name}/{key}"] = value.contiguous()
    save_file(found, f"{results}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
