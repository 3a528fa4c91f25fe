"""A linear layer as one operation against kernels as operations: `Linear(boundary="layer")` against "kernel".

    python -m bench.boundary          measures all recipes and writes boundary.json

Two layers of width 256 with a GELU between them, 256 rows, bfloat16, forward and backward. compile_cpu_s: processor
seconds of the first compiled step and of its compilers, in a new process with empty caches; nodes: operations in the
forward and the backward graph that Inductor is given; step_ms: processor time of a compiled and of an eager step once
that is done, the median of rounds in which both boundaries take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.common import interleave, versions, write_result
from bench.recipes import NAMES, named
from te_models.layers import Linear, autocast

WIDTH, ROWS = 256, 256
RECIPES = ("bf16", *NAMES)
BOUNDARIES = ("kernel", "layer")
ROUNDS, STEPS = 7, 20


def model_of(boundary: str) -> nn.Module:
    """Return the two layers."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "boundary": boundary}
    return nn.Sequential(Linear(WIDTH, WIDTH, **options), nn.GELU(), Linear(WIDTH, WIDTH, **options))


def step_of(run: Callable[[Tensor], Tensor], model: nn.Module, name: str) -> Callable[[], None]:
    """Return a forward and backward pass under a recipe."""
    x, recipe = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16).requires_grad_(), named(name)

    def step() -> None:
        model.zero_grad()
        x.grad = None
        with autocast(recipe is not None, recipe=recipe):
            y = run(x)
        y.sum().backward()

    return step


def cold(boundary: str, name: str) -> dict[str, Any]:
    """Compile in this process, and return what that took and how many operations the graphs have."""
    from torch._inductor import compile_fx

    counts: list[int] = []
    inner = compile_fx.compile_fx_inner

    def counted(graph: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
        counts.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return inner(graph, *args, **options)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=counted)

    model = model_of(boundary)
    step = step_of(torch.compile(model, fullgraph=True, backend=backend), model, name)
    before = os.times()
    step()
    seconds = sum(os.times()[:4]) - sum(before[:4])
    return {"compile_cpu_s": round(seconds, 2), "nodes": counts}


def cold_in_new_process(boundary: str, name: str) -> dict[str, Any]:
    """Return `cold` of a process that finds empty caches."""
    with tempfile.TemporaryDirectory() as scratch:
        # compilers are children of this one process, whose time is known when they end
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = scratch
        command = [sys.executable, "-m", "bench.boundary", boundary, name]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def steps(name: str) -> dict[str, dict[str, float]]:
    """Return milliseconds of a step, eager and compiled, of both boundaries in turns."""
    sides: dict[str, Callable[[], None]] = {}
    for boundary in BOUNDARIES:
        for kind in ("eager", "compiled"):
            model = model_of(boundary)
            run = torch.compile(model, fullgraph=True) if kind == "compiled" else model
            one = step_of(run, model, name)
            one()
            sides[f"{boundary} {kind}"] = lambda one=one: [one() for _ in range(STEPS)] and None
    samples = interleave(sides, rounds=ROUNDS, warmup=1)
    found: dict[str, dict[str, float]] = {}
    for side, sample in samples.items():
        boundary, kind = side.split()
        found.setdefault(boundary, {})[f"{kind}_ms"] = round(1e3 * statistics.median(sample.cpu) / STEPS, 3)
    return found


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:]:
        print(json.dumps(cold(*sys.argv[1:])))
        return
    cases: dict[str, Any] = {}
    for name in RECIPES:
        torch._dynamo.reset()
        timed = steps(name)
        for boundary in BOUNDARIES:
            cases[f"{name} {boundary}"] = cold_in_new_process(boundary, name) | timed[boundary]
            print(f"{name} {boundary}: {cases[f'{name} {boundary}']}", flush=True)
    payload = {"versions": versions("torch"), "width": WIDTH, "rows": ROWS, "cases": cases}
    print(f"written to {write_result('boundary', payload)}")


if __name__ == "__main__":
    main()
