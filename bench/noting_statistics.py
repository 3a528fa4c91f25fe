"""What statistics of quantization cost on CPU: runs that note them in no step, in one of many, and in every step.

    python -m bench.noting_statistics [NAME ...] [--rounds 7] [--steps 10]

Linear(1024, 1024) in bfloat16 with 256 rows, forward and backward, eager and compiled, under each recipe. Each side is
so many steps; the sides take turns (see `common`), and a ratio is that to the side that notes nothing, median of the
rounds. Training notes them in the steps that `log.statistics_every` names, "one"; until 22 November 2026 every
micro-batch of every step did it, "all".
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch

from bench.common import interleave, ratio, versions, write_result
from te_models.layers import Linear, autocast, collect_statistics, recipe

RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")
SIZE, ROWS = 1024, 256


def _run(name: str, steps: int, *, compiled: bool) -> Callable[[int], None]:
    """Return a function that does the steps, of which the first so many note statistics."""
    chosen = recipe(name)
    layer = Linear(SIZE, SIZE, params_dtype=torch.bfloat16)
    x = torch.randn(ROWS, SIZE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(ROWS, SIZE, dtype=torch.bfloat16)
    forward = torch.compile(layer, fullgraph=True) if compiled else layer

    def run(noting: int) -> None:
        for step in range(steps):
            with autocast(recipe=chosen), collect_statistics(step < noting):
                y = forward(x)
            y.backward(dy)
            x.grad = None
            layer.zero_grad()

    return run


def measure(name: str, *, compiled: bool, rounds: int, steps: int) -> dict[str, Any]:
    """Return the times of the three sides, and the ratios of two of them to the third."""
    torch._dynamo.reset()
    run = _run(name, steps, compiled=compiled)
    sides = {"none": lambda: run(0), "one": lambda: run(1), "all": lambda: run(steps)}
    found = interleave(sides, rounds=rounds, warmup=1)
    ratios = {f"{side}/none": ratio(found[side].cpu, found["none"].cpu) for side in ("one", "all")}
    return {side: samples.summary() for side, samples in found.items()} | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    for name in arguments.names:
        results[name] = {}
        for mode in ("eager", "compiled"):
            found = measure(name, compiled=mode == "compiled", rounds=arguments.rounds, steps=arguments.steps)
            results[name][mode] = found
            print(f"{name:8} {mode:9} one {found['one/none']} all {found['all/none']}", flush=True)
    details: dict[str, Any] = {
        "versions": versions("torch"),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "layer": f"Linear({SIZE}, {SIZE}) bfloat16, {ROWS} rows, forward and backward",
        "steps": arguments.steps,
    }
    print(f"wrote {write_result('noting_statistics', details | {'results': results})}")


if __name__ == "__main__":
    main()
