"""What compiling costs and gives: overhead of one call, compiled step against eager step, cold compile time by depth.

    python -m bench.compile [calls|cold|steps ...]   these parts only: prints, and with --update writes them to the file
    python -m bench.compile recipes                  this part has a file of its own, compile_recipes.json

calls   microseconds of a tiny Linear beyond torch.nn.Linear's, eager and compiled.
cold    seconds until the first train step is done, in a new process with empty caches, at 4 and 32 layers, in block
        and (at 4) whole mode; the fastest of the repetitions.
recipes processor seconds of the first train step of two layers under each recipe and of its compilers, in a new process
        with empty caches, against bf16; and of a second process that finds them filled.
steps   compiled against eager train step, dense and MoE, in bf16 and under each recipe, with the number of graphs that
        the steps needed and how often one had to be compiled again. Batches have several lengths, which a model is
        compiled for at once; milliseconds are those of a step, the mean over the lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from bench.common import interleave, ratio, update_result, versions, write_result
from bench.recipes import NAMES, named
from bench.shapes import Shape
from bench.steps import our_step
from te_models.layers import Linear

TARGETS = {"eager_extra_us": 40.0, "compiled_extra_us": 5.0, "cold_32_over_4": 1.5}
RECIPE_TARGETS = dict.fromkeys(NAMES, 2.0) | {"nvfp4": 3.0}
"""How many times as long as that of bf16 compiling under a recipe may take."""
STEP_SHAPES = (
    Shape("llama-512", hidden=512, layers=1, ffn=1408, batch=2, sequence=256),
    Shape("mixtral-512", hidden=512, layers=1, ffn=768, experts=8, batch=2, sequence=256),
)
STEP_LENGTHS = (256, 192, 131, 223)
"""Tokens in each sequence of a batch, the most first."""
STEP_RECIPES = ("bf16", *NAMES)
CALLS = 2000

_COLD = """
import json, os, sys, time
import torch
torch.set_num_threads(1)
from bench.recipes import named
from te_models import GPTModel, compile_model
from te_models.layers import autocast
folder, mode, name = sys.argv[1:]
recipe = named(name)
model = GPTModel.from_pretrained(folder, dtype=torch.bfloat16).train()
compile_model(model, mode, dynamic=False)
ids = torch.randint(model.config.vocab_size, (2, 64))
seconds = []
for _ in range(2):
    begun, before = time.perf_counter(), os.times()
    with autocast(recipe is not None, recipe=recipe):
        loss = model(ids, labels=ids, return_logits=False).loss
    loss.backward()
    seconds.append((time.perf_counter() - begun, sum(os.times()[:4]) - sum(before[:4])))
print(json.dumps(seconds))
"""


def calls() -> dict[str, Any]:
    """Compare single calls, which at this size are nothing but overhead."""
    ours, theirs = Linear(64, 64).bfloat16(), torch.nn.Linear(64, 64).bfloat16()
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    kinds = {"nn": theirs, "ours": ours}
    sides = {f"{name} eager": module for name, module in kinds.items()}
    sides |= {f"{name} compiled": torch.compile(module, fullgraph=True) for name, module in kinds.items()}
    found = {}
    with torch.no_grad():
        forward = {name: _repeat(lambda run=run: run(x)) for name, run in sides.items()}
        found["forward"] = _extra(interleave(forward, rounds=7))
    x = x.requires_grad_()
    both = {name: _repeat(lambda run=run: run(x).sum().backward()) for name, run in sides.items()}
    found["forward_and_backward"] = _extra(interleave(both, rounds=7))
    print(json.dumps(found, indent=2), flush=True)
    return found


def _repeat(run: Callable[[], object]) -> Callable[[], None]:
    def many() -> None:
        for _ in range(CALLS):
            run()

    return many


def _extra(samples: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return microseconds per call, fastest round, and what ours takes beyond the other."""
    us = {name: round(1e6 * min(s.cpu) / CALLS, 2) for name, s in samples.items()}
    found: dict[str, dict[str, Any]] = {}
    for kind in ("eager", "compiled"):
        extra, target = round(us[f"ours {kind}"] - us[f"nn {kind}"], 2), TARGETS[f"{kind}_extra_us"]
        found[kind] = {"us": us[f"ours {kind}"], "nn_us": us[f"nn {kind}"], "extra_us": extra, "met": extra <= target}
    return found


def cold(repetitions: int = 2) -> dict[str, Any]:
    """Time the first step of new processes that find empty caches."""
    found: dict[str, Any] = {}
    for mode, layers in (("block", 4), ("block", 32), ("whole", 4)):
        both = [cold_run(_cold_shape(layers), mode) for _ in range(repetitions if mode == "block" else 1)]
        runs = [(first[0], second[0]) for first, second in both]
        # less what the same step takes once compiled: depth makes that longer, too
        found[f"{mode}-{layers}"] = {
            "first_step_s": [round(first, 2) for first, _ in runs],
            "compile_s": round(min(first - second for first, second in runs), 2),
        }
        print(f"{mode} mode, {layers} layers: {found[f'{mode}-{layers}']}", flush=True)
    slower = round(found["block-32"]["compile_s"] / found["block-4"]["compile_s"], 3)
    return found | {"cold_32_over_4": slower, "met": slower <= TARGETS["cold_32_over_4"]}


def _cold_shape(layers: int) -> Shape:
    return Shape("cold", hidden=256, layers=layers, ffn=704, batch=2, sequence=64)


def cold_run(shape: Shape, mode: str, recipe: str = "bf16", processes: int = 1) -> list[list[float]]:
    """Return (seconds, processor seconds) of the first two steps of each process, with caches that the first finds
    empty."""
    found: list[list[float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        shape.write_random_model(Path(scratch) / "model")
        # compilers are children of this one process, whose time is known when they end
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/caches", "TE_MODELS_CACHE": f"{scratch}/te_models"}
        command = [sys.executable, "-c", _COLD, f"{scratch}/model", mode, recipe]
        for _ in range(processes):
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            found += json.loads(done.stdout.splitlines()[-1])
    return found


def recipes() -> dict[str, Any]:
    """Compare what compiling takes under each recipe with bf16."""
    found: dict[str, Any] = {}
    for name in STEP_RECIPES:
        first, _, warm, _ = cold_run(_cold_shape(2), "whole", name, processes=2)
        found[name] = {"cold_cpu_s": round(first[1], 2), "warm_cpu_s": round(warm[1], 2)}
        if name in RECIPE_TARGETS:
            over = round(first[1] / found["bf16"]["cold_cpu_s"], 3)
            found[name] |= {"over_bf16": over, "met": over <= RECIPE_TARGETS[name]}
        print(f"{name}: {found[name]}", flush=True)
    return found


def steps(rounds: int = 5) -> dict[str, Any]:
    """Compare compiled with eager steps, one recipe at a time."""
    found: dict[str, Any] = {}
    for shape in STEP_SHAPES:
        with tempfile.TemporaryDirectory() as scratch:
            folder, ids = Path(scratch), shape.input_ids()
            # tensors of their own: a view of another tensor is another kind of input, with a graph of its own
            batches = [ids[:, :length].clone(memory_format=torch.contiguous_format) for length in STEP_LENGTHS]
            shape.write_random_model(folder)
            for name in STEP_RECIPES:
                torch._dynamo.reset()
                counters.clear()
                clear_compilation_metrics()
                sides = {
                    kind: our_step(folder, *batches, compiled=kind == "compiled", dynamic=True, recipe=named(name))
                    for kind in ("compiled", "eager")
                }
                begun = time.perf_counter()
                sides["compiled"]()
                seconds = time.perf_counter() - begun
                samples = interleave(sides, rounds=rounds, warmup=1)
                case = {
                    "eager_over_compiled": ratio(samples["eager"].cpu, samples["compiled"].cpu),
                    "compiled_ms": round(1e3 * statistics.median(samples["compiled"].cpu) / len(batches), 1),
                    "compile_s": round(seconds, 1),
                    "graphs": counters["stats"]["unique_graphs"],
                    "recompiles": sum(bool(metric.recompile_reason) for metric in get_compilation_metrics()),
                    "graph_breaks": sum(counters["graph_break"].values()),
                }
                found[f"{shape.name} {name}"] = case
                print(f"{shape.name} {name}: {case}", flush=True)
    return found


PARTS = {"calls": calls, "cold": cold, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--update", action="store_true", help="write these parts to the file, each with its commit")
    options = parser.parse_args()
    parts = options.parts
    torch.set_num_threads(1)
    if parts == ["recipes"]:
        payload = {"versions": versions("torch"), "targets": RECIPE_TARGETS, "cases": recipes()}
        print(f"written to {write_result('compile_recipes', payload)}")
        return
    for name in parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; allowed: {', '.join(PARTS)}")
    found = {name: PARTS[name]() for name in parts or PARTS}
    if len(found) == len(PARTS):
        payload = {"versions": versions("torch"), "targets": TARGETS, **found}
        print(f"written to {write_result('compile', payload)}")
    elif options.update:
        print(f"written to {update_result('compile', found, ['torch'])}")


if __name__ == "__main__":
    main()
