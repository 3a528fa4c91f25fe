"""Quantization on CPU: the compiled reference against a copy of the same bytes in the same run.

    python -m bench.quantize [--rounds 9] [--only NAME ...]

A quantization reads x (bfloat16) once and writes data and scales; the bytes are counted from the tensors. Its peer is
`clone` of half as many bytes, which reads and writes as much in all; both sides allocate what they return. One thread,
CPU time, sides in turn (see `common`). `of_a_copy` is the speed as a share of the copy's: the median of the rounds, and
`best`, the fastest round of each side, which is what a machine busy with other work leaves undisturbed.

Two sizes. Results of the larger one exceed what the C library keeps for reuse (32 MiB), so both sides write to fresh
pages, as any such copy does; at the smaller one they reuse memory, and the copy is as fast as the memory is.

Per-tensor scaling by this very tensor ("current") and NVFP4 need the largest magnitude first: x is read twice, and
counted once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.common import interleave, ratio, versions, write_result
from te_models.kernels import quantize as q

E4M3 = torch.float8_e4m3fn
TARGETS = dict.fromkeys(("1x128", "1x128 both", "128x128", "mxfp8 1x32", "mxfp8 1x32 both", "mxfp8 32x32"), 0.5)
"""Shares of a copy's speed that these formats are to reach."""


SHAPES = ((2048, 4096), (8192, 8192))


def _current(x: Tensor) -> tuple[Tensor, ...]:
    scale = q.scale_from_amax(q.amax(x), E4M3)
    return q.quantize_per_tensor(x, scale, E4M3), scale


def _key() -> Tensor:
    return torch.tensor([1, 2])


CASES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "amax": lambda x: (q.amax(x),),
    "cast alone": lambda x: ((x.float() * 100.0).to(E4M3),),
    "per tensor, given scale": lambda x: (q.quantize_per_tensor(x, torch.full((), 100.0), E4M3),),
    "per tensor, current": _current,
    "1x128": lambda x: q.quantize_blockwise(x, (1, 128), E4M3, "pow2"),
    "1x128 float32 scales": lambda x: q.quantize_blockwise(x, (1, 128), E4M3, "float32"),
    "1x128 both": lambda x: q.quantize_blockwise_both(x, (1, 128), E4M3, "pow2"),
    "128x128": lambda x: q.quantize_blockwise(x, (128, 128), E4M3, "pow2"),
    "mxfp8 1x32": lambda x: q.quantize_blockwise(x, (1, 32), E4M3, "e8m0"),
    "mxfp8 1x32 both": lambda x: q.quantize_blockwise_both(x, (1, 32), E4M3, "e8m0"),
    "mxfp8 32x32": lambda x: q.quantize_blockwise(x, (32, 32), E4M3, "e8m0"),
    "nvfp4 1x16": lambda x: q.quantize_nvfp4(x),
    "nvfp4 16x16": lambda x: q.quantize_nvfp4(x, block_rows=16),
    "nvfp4 1x16 stochastic": lambda x: q.quantize_nvfp4(x, key=_key()),
    "nvfp4 both": lambda x: q.quantize_nvfp4_both(x),
    "nvfp4 both, rht": lambda x: q.quantize_nvfp4_both(x, with_rht=True),
}


def nbytes(*tensors: Tensor) -> int:
    """Return the bytes of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, rounds: int) -> dict[str, Any]:
    """Compile a quantization of x, check it against eager, and time it in turn with its copy."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    outputs, expected = compiled(x), function(x)
    for one, other in zip(outputs, expected, strict=True):
        if not torch.equal(_bytes(one), _bytes(other)):
            raise SystemExit("compiled and eager quantization differ: not measured")
    moved = nbytes(x, *outputs)
    source = torch.empty(moved // 2, dtype=torch.uint8).random_(0, 256)
    sides = interleave({"quantize": lambda: compiled(x), "copy": source.clone}, rounds=rounds)
    fastest = {side: min(samples.cpu) for side, samples in sides.items()}
    return {
        "bytes_per_element": round(moved / x.numel(), 3),
        "gb_per_s": round(moved / fastest["quantize"] / 1e9, 2),
        "copy_gb_per_s": round(moved / fastest["copy"] / 1e9, 2),
        "of_a_copy": ratio(sides["copy"].cpu, sides["quantize"].cpu)
        | {"best": round(fastest["copy"] / fastest["quantize"], 3)},
        **{side: samples.summary() for side, samples in sides.items()},
    }


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME", help="print these, write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        # the formats without a target are not measured twice
        names = args.only or (CASES if shape == SHAPES[0] else TARGETS)
        results["x".join(map(str, shape))] = {name: report(name, x, args.rounds) for name in names}
    if not args.only:
        details = {"versions": versions("torch"), "load_average": [round(load, 1) for load in os.getloadavg()]}
        print(f"wrote {write_result('quantize', details | {'results': results})}")


def report(name: str, x: Tensor, rounds: int) -> dict[str, Any]:
    """Measure one case and print a line."""
    result = measure(CASES[name], x, rounds)
    target = {"target": TARGETS[name]} if name in TARGETS else {}
    speed = result["of_a_copy"]
    print(
        f"{tuple(x.shape)} {name:<24} {result['gb_per_s']:6.2f} GB/s, copy {result['copy_gb_per_s']:6.2f} GB/s: "
        f"{speed['best']:.2f} of a copy (median {speed['median']:.2f}){', target 0.5' if target else ''}",
        flush=True,
    )
    return result | target


if __name__ == "__main__":
    main()
