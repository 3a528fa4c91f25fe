"""Quantize kernels, in shares of a copy's bandwidth; every bit compared with the reference first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_models.kernels import quantize as q
from te_models.kernels.quantize.fp8 import blocks, grouped, reference
from te_models.kernels.quantize.nvfp4 import copies as nvfp4_copies
from te_models.kernels.quantize.nvfp4 import reference as nvfp4

from .case import Case, Run, as_tensors, nbytes, same_bits
from .grouped import ragged
from .shapes import Shapes

E4M3 = torch.float8_e4m3fn
ROWWISE, BOTH = 0.85, 0.75


def cases(device: torch.device, shapes: Shapes) -> Iterator[Callable[[], Case]]:
    """Yield what builds each case."""
    rows, columns = shapes.quantize
    x = torch.randn(rows, columns, device=device).bfloat16()
    scale = q.scale_from_amax(q.amax(x), E4M3)
    splits = ragged(rows, shapes.groups, device)

    def case(name: str, run: Run, expected: Run, target: float, *inputs: torch.Tensor) -> Callable[[], Case]:
        def build() -> Case:
            moved = nbytes(*inputs, *as_tensors(run()))
            return Case(name, {"ours": run}, lambda results: _check(results, expected), moved, targets={"ours": target})

        return build

    def blockwise(name: str, block: tuple[int, int], kind: str) -> Iterator[Callable[[], Case]]:
        options = (block, E4M3, kind)
        run, expected = (lambda: q.quantize_blockwise(x, *options)), (lambda: reference.quantize_blockwise(x, *options))
        yield case(name, run, expected, ROWWISE, x)
        yield case(
            f"{name}, row + column",
            lambda: q.quantize_blockwise_both(x, *options),
            lambda: reference.quantize_blockwise_both(x, *options),
            BOTH,
            x,
        )

    yield case("amax", lambda: q.amax(x), lambda: blocks.amax(x), ROWWISE, x)
    exact = lambda: reference.quantize_per_tensor(x, scale, E4M3)  # noqa: E731
    yield case("per tensor", lambda: q.quantize_per_tensor(x, scale, E4M3), exact, ROWWISE, x)
    yield from blockwise("1x128", (1, 128), "pow2")
    yield from blockwise("128x128", (128, 128), "pow2")
    yield from blockwise("MXFP8 1x32", (1, 32), "e8m0")
    yield from _nvfp4(case, x)
    options = (x, splits, (1, 128), E4M3, "pow2")
    yield case(
        f"1x128, {shapes.groups} groups, row + column",
        lambda: q.quantize_grouped_blockwise(*options),
        lambda: grouped.quantize_grouped_blockwise(*options),
        BOTH,
        x,
    )
    data, scales = q.quantize_blockwise(x, (1, 128), E4M3, "pow2")
    back = (data, scales, (1, 128), torch.bfloat16)
    yield case(
        "dequantize 1x128",
        lambda: q.dequantize_blockwise(*back),
        lambda: reference.dequantize_blockwise(*back),
        ROWWISE,
        data,
        scales,
    )


def _nvfp4(case: Callable[..., Callable[[], Case]], x: torch.Tensor) -> Iterator[Callable[[], Case]]:
    """With the amaxes given, which take a pass of their own; the second as gradients are quantized."""
    key = torch.tensor([0, 1], device=x.device)
    amax, rotated = q.amax(x), q.quantize_nvfp4_transposed(x, with_rht=True)[2]
    yield case(
        "NVFP4 1x16",
        lambda: q.quantize_nvfp4(x, amax=amax),
        lambda: nvfp4.quantize_nvfp4(x, amax=amax),
        ROWWISE,
        x,
    )
    options = {"with_rht": True, "amax": rotated, "key": key}
    yield case(
        "NVFP4, transformed column, stochastic",
        lambda: q.quantize_nvfp4_transposed(x, **options),
        lambda: nvfp4_copies.quantize_nvfp4_transposed(x, **options),
        ROWWISE,
        x,
    )


def _check(results: dict[str, Any], expected: Run) -> None:
    same_bits(results, as_tensors(expected()))
