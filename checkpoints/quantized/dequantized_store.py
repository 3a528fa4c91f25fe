"""The quantized parameters of a folder as plain values, computed a region or a band of rows at a time."""

import itertools
from collections.abc import Collection, Iterator, Mapping

import torch

from te_models.layers.quantizer import Quantizer
from te_models.layers.quantizer.schema import FieldLayout, cut_multiple, field_layouts

from ..folder.checkpoint import Checkpoint
from ..io.boxes import Box, Range, Shape, slices
from ..io.dtypes import check_decoded, dtype_name
from ..io.header import TensorInfo, byte_count
from ..io.store import Store
from ..mapping.param_shapes import expected_tensors
from ..mapping.quantized_format import SUFFIXES, Description, quantizer_from_metadata
from ..mapping.te_namespace import formats_in_layout
from .row_blocks import bands


class ValueStore:
    """The tensors of a store, some parameters as values instead of their fields; `formats` are what they are stored in.

    Arguments:
        parameters: those to be seen as values: name -> logical shape, [out, in] or [G, out, in], and format.
        dtype: of the values; None: the logical dtype of each parameter.
    """

    def __init__(
        self,
        store: Store,
        parameters: Mapping[str, tuple[Shape, Description]],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._store, self._dtype = store, dtype
        self._values = {
            name: (shape, *quantizer_from_metadata(name, meta)) for name, (shape, meta) in parameters.items()
        }
        self.formats = {name: str(meta["format"]) for name, (_, meta) in parameters.items()}
        fields = {name + suffix for name in parameters for suffix in SUFFIXES.values()}
        self.tensors = {name: info for name, info in store.tensors.items() if name not in fields}
        for name, (shape, _, logical) in self._values.items():
            seen = dtype_name(dtype or logical)
            self.tensors[name] = TensorInfo(seen, shape, 0, byte_count(seen, shape))

    def can_read_bytes(self, name: str) -> bool:
        return name not in self._values and self._store.can_read_bytes(name)

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        self._store.read_into(name, begin, buffer)

    def read(self, name: str, box: Box) -> torch.Tensor:
        return check_decoded(self._region(name, box), name) if name in self._values else self._store.read(name, box)

    def _region(self, name: str, box: Box) -> torch.Tensor:
        """Return a region of a parameter's values; whole blocks around it are decoded."""
        shape, quantizer, logical = self._values[name]
        rows, columns = (_whole_blocks(quantizer, box[d], shape[d], d) for d in (-2, -1))
        usage = quantizer.stored_usages()[0]
        fields = {
            layout.name: self._store.read(name + SUFFIXES[layout.name], _field_box(layout, box[:-2], rows, columns))
            for layout in field_layouts(quantizer)
            if layout.usage == usage
        }
        fields = {field: entries.contiguous() for field, entries in fields.items()}
        values = quantizer.dequantize_fields(fields, self._dtype or logical, (rows.size, columns.size))
        return values[(..., *slices((_inside(box[-2], rows), _inside(box[-1], columns))))]

    def bands(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the values of a parameter, matrix after matrix, a band of rows [..., rows, in] at a time; unlike those
        that `read` returns they may be infinite or NaN."""
        (*leading, rows, columns), quantizer, _ = self._values[name]
        for place in itertools.product(*map(range, leading)):
            matrix = tuple(Range(i, i + 1) for i in place)
            for begin, end in bands(quantizer, (rows, columns), decoded=True):
                yield self._region(name, (*matrix, Range(begin, end), Range(0, columns)))


def as_values(ckpt: Checkpoint, names: Collection[str], dtype: torch.dtype | None = None) -> ValueStore:
    """Return the tensors of an open folder of ours with these parameters, by grouped names, as values."""
    layout = ckpt.layout or "grouped"
    formats = formats_in_layout(ckpt.config, layout, {name: ckpt.formats[name] for name in names})
    shapes = expected_tensors(ckpt.config, layout)
    return ValueStore(ckpt.store, {name: (shapes[name], meta) for name, meta in formats.items()}, dtype)


def _whole_blocks(quantizer: Quantizer, part: Range, size: int, dim: int) -> Range:
    """Return the smallest range of whole blocks around a part of a dimension of the matrix."""
    block = cut_multiple(quantizer, dim)
    last = part.start + (part.size - 1) * part.step
    return Range(part.start // block * block, min(size, (last // block + 1) * block))


def _field_box(layout: FieldLayout, lead: Box, rows: Range, columns: Range) -> Box:
    """Return where a field has the entries of a part of the matrix."""
    if layout.block is None:
        return lead
    parts = [Range(0, 0), Range(0, 0)]
    for dim, part in ((-2, rows), (-1, columns)):
        first, count = layout.entries(part.start, part.stop, dim)
        parts[layout.axis(dim)] = Range(first, first + count)
    return (*lead, *parts)


def _inside(part: Range, whole: Range) -> Range:
    return Range(part.start - whole.start, part.stop - whole.start, part.step)
