"""What a train step keeps in memory between its forward and its backward pass under every recipe, against bf16.

    python -m bench.memory [SHAPE ...] [--recipes NAME ...] [--modes MODE ...]   some only: prints, writes nothing

"storing" is "compiled" with activation_func_fp8_input_store, compared with bf16 without it.

Each side is a process of its own, in which the allocator returns freed memory at once, so that the resident memory is
what live tensors take: `kept` is what the third forward pass leaves, `peak` the highest point of it and its backward
pass, gradients included, both above what weights take. No optimizer: its state is the same on all sides. Linux only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.common import RETURNS_MEMORY, versions, write_result
from bench.recipes import NAMES, named
from bench.shapes import DENSE, MOE

TOKENS = {"batch": 4, "sequence": 1024}
SHAPES = {s.name: dataclasses.replace(s, **TOKENS) for s in (*DENSE, *MOE) if s.hidden == 1024}
MODES = ("eager", "compiled", "storing")
TARGET = 0.75


def _status(name: str) -> float:
    """Return a size of this process in MiB: VmRSS, or VmHWM, the highest since it was set back."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def one_side(folder: Path, shape: str, recipe: str, mode: str) -> dict[str, float]:
    """Run three forward and backward passes in this process and return the figures of the last."""
    import te_models
    from te_models.layers import autocast
    from te_models.training.config import PrecisionConfig
    from te_models.training.step import make_loss_function

    model = te_models.GPTModel.from_pretrained(folder, dtype=torch.bfloat16).train()
    model.activation_func_fp8_input_store = mode == "storing"
    loss_function = make_loss_function(model, PrecisionConfig(dtype="bf16"), "cpu", compiled=mode != "eager")
    its, ids = named(recipe), SHAPES[shape].input_ids()
    found: dict[str, float] = {}
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        with autocast(enabled=its is not None, recipe=its):
            loss = loss_function(ids)[0]
        kept = _status("VmRSS") - before
        loss.backward()
        found = {"kept_mib": round(kept, 1), "peak_mib": round(_status("VmHWM") - before, 1), "loss": loss.item()}
    return found


def measure(shape: str, recipes: list[str], modes: list[str]) -> dict[str, Any]:
    """Compare the recipes with bf16 on one shape."""
    found: dict[str, Any] = {"shape": SHAPES[shape].to_dict()}
    with tempfile.TemporaryDirectory() as scratch:
        SHAPES[shape].write_random_model(Path(scratch))
        base: dict[str, float] = {}
        for mode in modes:
            sides: dict[str, dict[str, float]] = {}
            for recipe in ("bf16", *recipes):
                command = [sys.executable, "-W", "ignore", "-m", "bench.memory", "--side", scratch, shape, recipe, mode]
                ended = subprocess.run(
                    command, env=os.environ | RETURNS_MEMORY, check=True, stdout=subprocess.PIPE, text=True
                )
                side = sides[recipe] = json.loads(ended.stdout.splitlines()[-1])
                if recipe == "bf16" and (mode != "storing" or not base):
                    base = side
                if not abs(side["loss"] / base["loss"] - 1) < 0.04:
                    sys.exit(f"refusing to compare: the loss of {recipe} is {side['loss']}, not near bf16's")
                for name in ("kept", "peak"):
                    side[f"{name}_over_bf16"] = round(side[f"{name}_mib"] / base[f"{name}_mib"], 3)
                print(f"{shape}, {mode}, {recipe}: {side}", flush=True)
            found[mode] = sides
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help=", ".join(SHAPES))
    parser.add_argument("--recipes", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.side:
        folder, *rest = args.side
        print(json.dumps(one_side(Path(folder), *rest)))
        return
    unknown = sorted(set(args.shapes) - set(SHAPES))
    if unknown:
        parser.error(f"there is no shape {unknown[0]!r}; allowed: {', '.join(SHAPES)}")
    cases = [measure(shape, args.recipes, args.modes) for shape in args.shapes or SHAPES]
    if not args.shapes and set(args.recipes) == set(NAMES) and set(args.modes) == set(MODES):
        payload = {"versions": versions("torch"), "dtype": "bfloat16", "target": TARGET, "cases": cases}
        print(f"written to {write_result('memory', payload)}")


if __name__ == "__main__":
    main()
