"""Outputs of stacks of experts in a format that stores them as ModelOpt does (`formats/stacks.py`)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch

from .dtypes import torch_dtype
from .formats import WeightFormat
from .formats.format import Part
from .formats.namespace import FieldNamespace
from .formats.stacks import stacked_name
from .move import read_bands
from .plan import Output, Plan
from .quantized_format import SUFFIXES
from .store import Store

_BAND = 1 << 20


def unequal_stacks(
    store: Store, plan: Plan, found: FieldNamespace, weight_format: WeightFormat, stacks: Sequence[str]
) -> dict[str, str]:
    """Return parameter -> why its experts cannot have one number; this reads such numbers."""
    parts = [part for part in weight_format.scales if part.block is None]
    numbers = {weight + part.suffix: part for weight in stacks for part in parts}
    owners, unequal = found.owners, dict[str, str]()
    for output in plan.outputs:
        part = numbers.get(output.name)
        if part is None or output.name not in found.fields:
            continue
        values = torch.cat([band.flatten() for _, band in read_bands(store, output, _BAND)])
        if not (values == values[0]).all():
            parameter = owners[output.name].removesuffix(SUFFIXES[f"rowwise_{part.field}"])
            unequal[parameter] = f"its experts have scales of their own, where {weight_format.name} has one for all"
    return unequal


def stacked_outputs(store: Store, outputs: list[Output], weight: str, weight_format: WeightFormat) -> list[Output]:
    """Return the parts of a weight, made as [E, out, in] and [E], as they are written."""
    return [_as_it_lies(store, out, weight, part) for out, part in zip(outputs, weight_format.parts, strict=True)]


def _as_it_lies(store: Store, output: Output, weight: str, part: Part) -> Output:
    name, variant = stacked_name(weight, part), f"{output.variant} as it lies"
    if part.block is None:
        compute = functools.partial(_first, store, output)
        return Output(name, output.dtype, (), output.pieces, compute, variant, output.owner)
    experts, rows, columns = output.shape
    compute = functools.partial(_turned, store, output)
    return Output(name, output.dtype, (experts, columns, rows), output.pieces, compute, variant, output.owner)


def _parts(store: Store, output: Output) -> Iterable[torch.Tensor]:
    return output.compute() if output.compute is not None else (band for _, band in read_bands(store, output, _BAND))


def _first(store: Store, output: Output) -> Iterator[torch.Tensor]:
    yield next(iter(_parts(store, output))).flatten()[0].clone()  # all are equal, which is known by now


def _turned(store: Store, output: Output) -> Iterator[torch.Tensor]:
    """Yield matrix after matrix, from parts that end anywhere between rows."""
    _, rows, columns = output.shape
    matrix, filled = torch.empty(rows * columns, dtype=torch_dtype(output.dtype)), 0
    for part in _parts(store, output):
        flat = part.reshape(-1).view(matrix.dtype)
        while len(flat):
            n = min(len(flat), len(matrix) - filled)
            matrix[filled : filled + n] = flat[:n]
            flat, filled = flat[n:], filled + n
            if filled == len(matrix):
                yield matrix.view(rows, columns).t().contiguous()[None]
                filled = 0
