"""What quantizing and requantizing a stored weight costs: eager code, compiled functions, and a copy of its bytes.

    python -m bench.stored_formats [--rounds 7]

A band of 512 x 1024 bfloat16 numbers goes through what `checkpoints.quantize` and a requantizing import do to it,
hashing and files left out: quantized once per stored copy, or decoded from FP8 in 128x128 blocks and quantized with the
largest error. One thread, processor time, all sides in turn (see `common`). `gain` is eager time over compiled time,
median of the rounds. `best_ns` is nanoseconds an element of the fastest round, which other work disturbs least.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch

from bench.common import interleave, ratio, versions, write_result
from te_models.checkpoints.quantized.row_blocks import _quantized, by_usage
from te_models.kernels.quantize import eager, load_compiled
from te_models.layers import recipe

SHAPE = (512, 1024)
RECIPES = ("block", "mxfp8", "nvfp4")
_REPEATS = 2


def _work(name: str, x: torch.Tensor, *, decode: bool) -> Callable[[], object]:
    quantizer = recipe(name).weight_quantizer()
    copies, amaxes = by_usage(quantizer), quantizer.amaxes(x)
    blocks = recipe("block", use_f32_scales=True).weight_quantizer()
    fields = blocks.quantize_fields(x)

    def run() -> None:
        for _ in range(_REPEATS):
            rows = blocks.dequantize_fields(fields, torch.bfloat16, x.shape) if decode else x
            for copy in copies:
                _quantized(copy, rows, amaxes, measure=decode)

    return run


def _with(functions: dict[str, Callable[..., Any]], run: Callable[[], object]) -> Callable[[], None]:
    def side() -> None:
        eager.compiled.clear()
        eager.compiled.update(functions)
        run()

    return side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = (torch.randn(SHAPE) * 0.02).bfloat16()
    if not load_compiled():
        raise SystemExit("there is no C++ compiler, so there is nothing to compare")
    functions = dict(eager.compiled)
    sides: dict[str, Callable[[], object]] = {"copy": lambda: [x.clone() for _ in range(_REPEATS)]}
    for name in RECIPES:
        for verb, decode in (("quantize", False), ("requantize", True)):
            run = _work(name, x, decode=decode)
            sides[f"{verb} {name} eager"] = _with({}, run)
            sides[f"{verb} {name} compiled"] = _with(functions, run)
    found = interleave(sides, rounds=rounds)
    results: dict[str, Any] = {}
    for name, samples in found.items():
        results[name] = {"best_ns": round(1e9 * min(samples.cpu) / _REPEATS / x.numel(), 2)}
        if name.endswith("compiled"):
            results[name]["gain"] = ratio(found[name.replace("compiled", "eager")].cpu, samples.cpu)
        print(name, results[name], flush=True)
    details = {"versions": versions("torch"), "load_average": [round(load, 1) for load in os.getloadavg()]}
    print(f"wrote {write_result('stored_formats', details | {'shape': SHAPE, 'results': results})}")


if __name__ == "__main__":
    main()
