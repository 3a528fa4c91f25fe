"""Optimizer moments in few bits on CPU: what rounding them stochastically adds to a step, and what its bits cost.

    python -m bench.moments [--rounds 15]

20 M bfloat16 parameters in ten matrices; FusedAdamW with compiled encoding by dtype of moments, beside torch's fused
AdamW, whose moments are bfloat16 rounded to nearest. The bits alone, of as many elements: the hash that moments use,
and Philox, which they used before. One thread, CPU time, all sides in turn (see `common`); `of_float32` is a step's
time over that of the step with float32 moments, median of the rounds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.common import interleave, ratio, versions, write_result
from te_models.kernels.quantize import hash_key, hashed_bits, random_bits
from te_models.layers import FusedAdamW

SHAPE, COUNT = (4096, 512), 10
PIECE = 1 << 19


def _parameters() -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.randn(SHAPE).bfloat16()) for _ in range(COUNT)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def _steps() -> dict[str, Callable[[], Any]]:
    sides: dict[str, Callable[[], Any]] = {"torch": torch.optim.AdamW(_parameters(), fused=True).step}
    for dtype in ("float32", "bfloat16", "float8"):
        sides[dtype] = FusedAdamW(_parameters(), moment_dtype=dtype, compile=True).step
    return sides


def _generators() -> dict[str, Callable[[], Any]]:
    """Each draws bits for all parameters, in the pieces that the optimizer works in."""
    pieces = COUNT * SHAPE[0] * SHAPE[1] // PIECE
    hashed = torch.compile(lambda key, step, begin: hashed_bits(key, step, begin, (PIECE,)))
    philox = torch.compile(lambda key: random_bits(key, 1, (PIECE,)))
    key, scalar, pair = hash_key(1, 2), torch.zeros((), dtype=torch.int32), torch.tensor([1, 2])
    return {
        "hash": lambda: [hashed(key, scalar, scalar) for _ in range(pieces)],
        "philox": lambda: [philox(pair) for _ in range(pieces)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = interleave(_steps() | _generators(), rounds=rounds)
    results: dict[str, Any] = {}
    for name, samples in found.items():
        results[name] = samples.summary()
        if name not in ("hash", "philox"):
            results[name]["of_float32"] = ratio(samples.cpu, found["float32"].cpu)
        print(name, results[name], flush=True)
    details = {"versions": versions("torch"), "load_average": [round(load, 1) for load in os.getloadavg()]}
    print(f"wrote {write_result('moments', details | {'parameters': COUNT * SHAPE[0] * SHAPE[1], 'results': results})}")


if __name__ == "__main__":
    main()
