"""Quantize and dequantize a matrix a band of rows at a time, so that no float32 copy is larger than a band.

Quantizing works in float32, and in several copies: for a whole matrix that is many times what is read or written. A
band ends where a block of the format ends, so its fields are a part of the matrix's, number for number; a scale that
belongs to the whole matrix comes from a first pass over the bands. (Only the Hadamard transform, which no weight gets,
would pad rows.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from te_models.layers import Quantizer
from te_models.layers.field_schema import FieldLayout, alignment, field_layouts
from te_models.layers.quantizer import Usage

from .boxes import Shape

BAND_ELEMENTS = 1 << 18
"""Elements of a band; a matrix that is too wide for it has bands of one block of rows."""

Map = Callable[[Callable[..., Any], Iterable[Any]], Iterable[Any]]
"""What the built-in `map` and the one of a thread pool do."""

Rows = tuple[int, int]
"""Begin and end, a part of the rows of a matrix or of one dimension of a field."""


def bands(quantizer: Quantizer, shape: Shape) -> list[Rows]:
    """Cut the rows of a matrix [rows, columns] between the blocks of the format."""
    rows, columns = shape
    block = alignment(quantizer, -2)
    step = max(1, BAND_ELEMENTS // max(1, columns * block)) * block
    return [(begin, min(rows, begin + step)) for begin in range(0, rows, step)]


def quantize_into(
    fields: dict[str, torch.Tensor],
    quantizer: Quantizer,
    shape: Shape,
    read: Callable[[int, int], torch.Tensor],
    run: Map = map,
) -> None:
    """Fill the stored fields of a matrix [rows, columns]; `read(begin, end)` returns those rows of it.

    run: applies a function to every band; the bands may be done in any order and at the same time.
    """
    parts = bands(quantizer, shape)
    amaxes: dict[Usage, torch.Tensor] = quantizer.amaxes(read(*parts[0]))
    if amaxes:
        for found in run(lambda band: quantizer.amaxes(read(*band)), parts[1:]):
            amaxes |= {usage: torch.maximum(amaxes[usage], amax) for usage, amax in found.items()}
    layouts = field_layouts(quantizer)

    def fill(band: Rows) -> None:
        stored = quantizer.quantize_fields(read(*band), amaxes=amaxes)
        for layout in layouts:
            part = field_rows(layout, band)
            out = fields[layout.name]
            target = out if part is None else out.narrow(layout.axis(-2), part[0], part[1] - part[0])
            target.copy_(stored[layout.name])

    for _ in run(fill, parts):
        pass


def dequantize_bands(
    quantizer: Quantizer,
    shape: Shape,
    dtype: torch.dtype,
    read: Callable[[str, int, Rows | None], torch.Tensor],
) -> Iterator[torch.Tensor]:
    """Yield the values of a matrix [rows, columns], band after band.

    `read(field, axis, part)` returns `part` of a field along its axis -2 or -1, or all of it where part is None.
    """
    usage = quantizer.stored_usages()[0]
    layouts = [layout for layout in field_layouts(quantizer) if layout.usage == usage]
    for band in bands(quantizer, shape):
        fields = {layout.name: read(layout.name, layout.axis(-2), field_rows(layout, band)) for layout in layouts}
        yield quantizer.dequantize_fields(fields, dtype, (band[1] - band[0], shape[1]))


def field_rows(layout: FieldLayout, band: Rows) -> Rows | None:
    """Return which part of a field a band of rows has; None: there is one entry for the whole matrix."""
    if layout.block is None:
        return None
    rows = layout.block[0]
    return band[0] // rows, -(-band[1] // rows)
