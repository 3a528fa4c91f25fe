"""What each of the two processes of test_collectives does:
`python -m tests.layers.te.ops.collective_ranks RESULTS MODES`.

Each rank runs every collective, eager or compiled as MODES says, and writes inputs, outputs and gradients to
RESULTS.<rank>.
"""

from __future__ import annotations

import copy
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from te_models.layers import ops

KINDS = {"gather": ops.AllGather, "scatter": ops.ReduceScatter, "reduce": ops.AllReduce}


def main(results: str, modes: list[str]) -> None:
    """Run every case in these modes on this rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(dist.get_rank())
    both = dist.new_group([0, 1])
    found = {}
    for name, kind in KINDS.items():
        model = ops.Sequential(ops.ConstantScale(2.0), kind(both), ops.ConstantScale(3.0))
        model = copy.deepcopy(model)  # a group of its own cannot be copied, its name can
        x = torch.randn(4, 3, requires_grad=True)
        runs = {"eager": model, "compiled": torch.compile(model, fullgraph=True, backend="aot_eager")}
        dy = None
        for mode in modes:
            x.grad = None
            y = runs[mode](x)
            dy = torch.randn(y.shape) if dy is None else dy
            y.backward(dy)
            found |= {f"{name}/{mode}/{key}": t.detach().clone() for key, t in (("y", y), ("dx", x.grad))}
        found |= {f"{name}/x": x.detach(), f"{name}/dy": dy}
    save_file(found, f"{results}.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
