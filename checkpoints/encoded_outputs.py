"""Parts of a format made of the fields of our storage: moved where they are the same numbers, encoded where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from te_models.layers.quantizer import Quantizer

from .boxes import Shape
from .fitting import coarser
from .formats import WeightFormat, encode
from .formats.format import Part
from .formats.namespace import FieldNamespace
from .formats.views import field_blocks
from .move import read_bands
from .plan import Output, Plan
from .quantized_format import SUFFIXES
from .store import Store

_BAND = 1 << 22


class Encoder:
    """Makes the outputs of quantized weights from the plan that moves their fields.

    imported: see `encode.written_number`. encoded: the outputs that are computed, not moved.
    """

    def __init__(
        self,
        store: Store,
        weight_format: WeightFormat,
        found: FieldNamespace,
        quantizers: Mapping[str, Quantizer],
        details: Mapping[str, Any],
    ) -> None:
        self._store, self._format, self._found, self._details = store, weight_format, found, details
        self.imported: Mapping[str, float] | None = details.get("numbers")
        self._quantizer = {link.stored: quantizers[name] for name, link in _owners(found, quantizers)}
        self.encoded: set[str] = set()

    def outputs(self, moved: Plan, weights: list[str]) -> dict[str, list[Output]]:
        """Return them by weight."""
        fields = {output.name: output for output in moved.outputs if output.name in self._found.fields}
        outputs: dict[str, list[Output]] = {}
        for weight in weights:
            shape = self._weight_shape(fields, weight)
            outputs[weight] = []
            for part in self._format.parts:
                name = weight + part.suffix
                carrier = self._found.repeats.get(name, name)
                outputs[weight].append(self._output(name, carrier, fields[carrier], part, shape))
        return outputs

    def shape(self, part: Part, weight: Shape) -> Shape:
        """Return the shape in which a part of a weight is written: the number of a whole matrix is a scalar or [1]."""
        shapes = part.shapes(weight)
        return shapes[1] if len(shapes) == 2 and self._details.get("ones", {}).get(part.suffix, part.one) else shapes[0]

    def _weight_shape(self, fields: Mapping[str, Output], weight: str) -> Shape:
        data = fields[weight + self._format.data.suffix]
        packed = field_blocks(self._quantizer[data.name])["data"]
        assert packed is not None, "data has an entry per element or per pair"
        return (*data.shape[:-1], data.shape[-1] * packed[1])

    def _output(self, name: str, carrier: str, field: Output, part: Part, weight: Shape) -> Output:
        shape = self.shape(part, weight)
        dtype = self._details.get("dtypes", {}).get(part.suffix, part.dtypes[0])
        block = field_blocks(self._quantizer[carrier])[part.field]
        repeat = 1 if part.block is None or block is None else max(1, block[0] // part.block[0])
        every = coarser(part, block, field.shape)
        convert = encode.encoder(part, self._format.element, field.dtype, dtype, name, self.imported)
        if convert is None and (shape, dtype, repeat) == (field.shape, field.dtype, 1):
            return replace(field, name=name)
        self.encoded.add(name)
        compute = _encoded(self._store, field, convert, repeat, every, weight[-2])
        variant = f"{self._format.name} {part.suffix}"
        return Output(name, dtype, shape, field.pieces, compute, variant)


def _owners(found: FieldNamespace, quantizers: Mapping[str, Quantizer]) -> Iterator[tuple[str, Any]]:
    """Pairs (parameter, link) for every link of a field."""
    fields = {name + suffix: name for name in quantizers for suffix in SUFFIXES.values()}
    return ((fields[link.name], link) for link in found.namespace.links if link.name in fields)


def _encoded(
    store: Store,
    field: Output,
    convert: Callable[[torch.Tensor], torch.Tensor] | None,
    repeat: int,
    every: tuple[int, int],
    rows: int,
) -> Callable[[], Iterator[torch.Tensor]]:
    """Return the function that reads a field band after band of its first dimension and encodes it.

    repeat: how often an entry is written along the rows. every: the rows and columns of entries of which one is.
    """

    def compute() -> Iterator[torch.Tensor]:
        for begin, band in read_bands(store, field, _BAND, multiple=every[0]):
            if every != (1, 1):
                # a copy, because a single entry would keep a stride that its bytes cannot be seen by
                band = band[..., :: every[0], :: every[1]].clone(memory_format=torch.contiguous_format)
            if repeat > 1:
                stop = rows - begin * repeat if len(field.shape) == 2 else rows
                band = band.repeat_interleave(repeat, -2)[..., :stop, :]
            yield band if convert is None else convert(band)

    return compute
