"""Quantization on CPU: the compiled reference, and our C++, against a copy of the same bytes in the same run.

    python -m bench.quantize [--rounds 9] [--only NAME ...]

A quantization reads x (bfloat16) once and writes data and scales; the bytes are counted from the tensors. Its peer is
`clone` of half as many bytes, which reads and writes as much in all; both sides allocate what they return. One thread,
CPU time, sides in turn (see `common`). `of_a_copy` is the speed as a share of the copy's: the median of the rounds, and
`best`, the fastest round of each side, which is what a machine busy with other work leaves undisturbed.

Two sizes. Results of the larger one exceed what the C library keeps for reuse (32 MiB), so both sides write to fresh
pages, as any such copy does; at the smaller one they reuse memory, and the copy is as fast as the memory is.

`of_compiled` is the speed of the C++ functions that graphs and eager layers call (`kernels/quantize/cpu`: rounded
for a GEMM; `fields`: stored) as a multiple of that of the definitions as Inductor compiles them, with equal bits.

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
from te_models.kernels.quantize.cpu import fields
from te_models.kernels.quantize.cpu import rounding as graph
from te_models.kernels.quantize.fp8 import rounding
from te_models.kernels.quantize.nvfp4 import reference as nvfp4

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
    "nvfp4 columnwise, rht": lambda x: q.quantize_nvfp4_transposed(x, with_rht=True),
    "rounded, given scale": lambda x: (rounding.round_per_tensor(x, torch.full((), 100.0), E4M3, x.dtype),),
    "rounded, current": lambda x: rounding.round_current(x, E4M3, x.dtype),
    "rounded 1x128": lambda x: (rounding.round_blockwise(x, (1, 128), E4M3, "pow2", x.dtype),),
    "rounded mxfp8 1x32": lambda x: (rounding.round_blockwise(x, (1, 32), E4M3, "e8m0", x.dtype),),
    "rounded nvfp4 1x16": lambda x: (nvfp4.round_nvfp4(x, x.dtype)[0],),
    "rounded nvfp4 1x16 stochastic": lambda x: (nvfp4.round_nvfp4(x, x.dtype, key=_key())[0],),
    "rounded nvfp4 16x1 stochastic": lambda x: (nvfp4.round_nvfp4(x, x.dtype, block=(16, 1), key=_key())[0],),
}


def _blocks(x: Tensor, block: tuple[int, int], kind: str) -> tuple[Tensor, ...]:
    return (fields.quantize_blocks(x, block, kind, 0.0, measured=False) or ())[:2]


def _nvfp4(x: Tensor, block_rows: int) -> tuple[Tensor, ...]:
    amax = graph.amax(x)
    return (*(fields.quantize_nvfp4(x, block_rows, float(amax), measured=False) or ())[:2], amax)


def _rounded_nvfp4(x: Tensor, key: Tensor | None, block: tuple[int, int] = (1, 16)) -> tuple[Tensor, ...]:
    return (graph.round_nvfp4(x, block, graph.amax(x), x.dtype, key),)


CPP: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "per tensor, given scale": lambda x: (fields.quantize_scaled(x, 100.0, 0.01, measured=False) or ())[:1],
    "1x128": lambda x: _blocks(x, (1, 128), "pow2"),
    "1x128 float32 scales": lambda x: _blocks(x, (1, 128), "float32"),
    "128x128": lambda x: _blocks(x, (128, 128), "pow2"),
    "mxfp8 1x32": lambda x: _blocks(x, (1, 32), "e8m0"),
    "mxfp8 32x32": lambda x: _blocks(x, (32, 32), "e8m0"),
    "nvfp4 1x16": lambda x: _nvfp4(x, 1),
    "nvfp4 16x16": lambda x: _nvfp4(x, 16),
    "rounded, given scale": lambda x: (graph.round_scaled(x, torch.full((), 100.0), E4M3, x.dtype),),
    "rounded, current": lambda x: graph.round_current(x, E4M3, False, 0.0, x.dtype),
    "rounded 1x128": lambda x: (graph.round_fp8(x, (1, 128), E4M3, "pow2", x.dtype, 0.0),),
    "rounded mxfp8 1x32": lambda x: (graph.round_fp8(x, (1, 32), E4M3, "e8m0", x.dtype, 0.0),),
    "rounded nvfp4 1x16": lambda x: _rounded_nvfp4(x, None),
    "rounded nvfp4 1x16 stochastic": lambda x: _rounded_nvfp4(x, _key()),
    "rounded nvfp4 16x1 stochastic": lambda x: _rounded_nvfp4(x, _key(), (16, 1)),
}
"""The same by our C++; what is missing is made of two of these."""


def nbytes(*tensors: Tensor) -> int:
    """Return the bytes of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(name: str, x: Tensor, rounds: int) -> dict[str, Any]:
    """Compile a quantization of x, check it and the C++ against eager, and time them in turn with their copy."""
    torch._dynamo.reset()
    function, ours = CASES[name], CPP.get(name)
    compiled = torch.compile(function, fullgraph=True)
    outputs, expected = compiled(x), function(x)
    for found in (outputs, expected if ours is None else ours(x)):
        if not all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(found, expected, strict=True)):
            raise SystemExit(f"{name}: compiled code and eager definitions differ: not measured")
    moved = nbytes(x, *outputs)
    source = torch.empty(moved // 2, dtype=torch.uint8).random_(0, 256)
    functions: dict[str, Callable[[], Any]] = {"quantize": lambda: compiled(x), "copy": source.clone}
    if ours is not None:
        functions["cpp"] = lambda: ours(x)
    sides = interleave(functions, rounds=rounds)
    fastest = {side: min(samples.cpu) for side, samples in sides.items()}
    return {
        "bytes_per_element": round(moved / x.numel(), 3),
        "gb_per_s": round(moved / fastest["quantize"] / 1e9, 2),
        "copy_gb_per_s": round(moved / fastest["copy"] / 1e9, 2),
        "of_a_copy": ratio(sides["copy"].cpu, sides["quantize"].cpu)
        | {"best": round(fastest["copy"] / fastest["quantize"], 3)},
        **({} if ours is None else {"cpp_of_a_copy": ratio(sides["copy"].cpu, sides["cpp"].cpu)}),
        **({} if ours is None else {"of_compiled": ratio(sides["quantize"].cpu, sides["cpp"].cpu)}),
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
    result = measure(name, x, rounds)
    target = {"target": TARGETS[name]} if name in TARGETS else {}
    speed = result["of_a_copy"]
    print(
        f"{tuple(x.shape)} {name:<24} {result['gb_per_s']:6.2f} GB/s, copy {result['copy_gb_per_s']:6.2f} GB/s: "
        f"{speed['best']:.2f} of a copy (median {speed['median']:.2f}){', target 0.5' if target else ''}"
        + (f"; C++ {result['of_compiled']['median']:.2f} times as fast" if name in CPP else ""),
        flush=True,
    )
    return result | target


if __name__ == "__main__":
    main()
