"""Our compiled train step (forward, backward, AdamW) under every recipe, against our compiled bf16 step.

    python -m bench.recipe_step [HIDDEN ...] [--recipes NAME ...]   these only: prints, writes nothing

One layer of a llama-shaped model and the output layer, one graph. Nothing is timed unless the losses of the first
steps are near bf16's. All sides take turns in every round; the result is the ratio of the fastest rounds, in CPU time,
because other work on the machine only ever adds time. The median of the rounds' ratios is written down beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.common import interleave, ratio, versions, write_result
from bench.recipes import NAMES, named
from bench.shapes import RECIPES, Shape
from bench.steps import our_step

TARGETS = dict.fromkeys(NAMES, 1.25) | {"nvfp4": 1.6}
"""How many times as long as the bf16 step a step may take, for the shapes in TARGET_HIDDEN."""
TARGET_HIDDEN = (1024, 2048)
NEAR = {"nvfp4": 0.04, "delayed": 0.04}
"""How far the first losses may be from bf16's, relative; 0.02 for the other recipes. Delayed scaling has seen nothing
in its first step and scales by 1 there."""


def measure(shape: Shape, recipes: list[str], rounds: int) -> dict[str, Any]:
    """Compare the recipes with bf16 on one shape."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape.write_random_model(folder)
        ids = shape.input_ids()
        sides = {name: our_step(folder, ids, compiled=True, recipe=named(name)) for name in ("bf16", *recipes)}
        losses = {name: [round(float(step()), 5) for _ in range(2)] for name, step in sides.items()}
        for name, values in losses.items():  # not bf16: only that it trains alike
            if not max(abs(a / b - 1) for a, b in zip(values, losses["bf16"])) < NEAR.get(name, 0.02):
                sys.exit(f"refusing to time: the losses of {name} are {values}, not near {losses['bf16']}")
        samples = interleave(sides, rounds=rounds, warmup=1)
    base = samples["bf16"].cpu
    times = {}
    for name in recipes:
        target = TARGETS[name]
        best = round(min(samples[name].cpu) / min(base), 3)
        times[name] = {"best": best, "rounds": ratio(samples[name].cpu, base)}
        if shape.hidden in TARGET_HIDDEN:
            times[name] |= {"target": target, "met": best <= target}
    return {
        "shape": shape.to_dict(),
        "losses": losses,
        "best_cpu_ms": {name: round(1e3 * min(s.cpu), 1) for name, s in samples.items()},
        "time_over_bf16": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hidden", nargs="*", type=int, help=", ".join(str(shape.hidden) for shape in RECIPES))
    parser.add_argument("--recipes", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for shape in RECIPES:
        if args.hidden and shape.hidden not in args.hidden:
            continue
        case = measure(shape, args.recipes, args.rounds)
        cases.append(case)
        found = ", ".join(
            f"{name} {t['best']}x (rounds {t['rounds']['min']} to {t['rounds']['max']})"
            for name, t in case["time_over_bf16"].items()
        )
        print(f"{shape.name}: time over bf16: {found}", flush=True)
    if len(cases) == len(RECIPES) and set(args.recipes) == set(NAMES):
        payload = {"versions": versions("torch"), "dtype": "bfloat16", "rounds": args.rounds, "cases": cases}
        print(f"written to {write_result('recipe_step', payload)}")


if __name__ == "__main__":
    main()
