"""A quantized Hugging Face folder as the target of a conversion: a quantized weight is one tensor per part of a format.

The fields of a parameter that the format takes over are moved where a part has the same bytes, and encoded on the way
where it has not (packed, in another dtype, the inverse). Stacks of experts that a format stores as ModelOpt does
(`formats/stacks.py`) are transposed last. A requantized tensor of the files is quantized by itself, but for the
per-matrix amax, taken over all tensors that one parameter joins.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from te_models.layers.quantizer import Quantizer

from ..formats import WeightFormat, encode
from ..formats.format import Part
from ..formats.namespace import FieldNamespace
from ..formats.stacks import stacked_name
from ..formats.views import field_blocks
from ..io.boxes import Shape
from ..io.dtypes import dtype_name, torch_dtype
from ..io.store import Store
from ..plan.plan import Output
from ..plan.quantized_format import SUFFIXES
from ..plan.stream import read_bands
from ..plan.tensor_map import Namespace
from .representable import coarser
from .requantize import AmaxesOf, WrittenTensor
from .route import Target
from .row_blocks import JoinedAmaxes, matrix_keys

_BAND = 1 << 22
_STACK_BAND = 1 << 20


class FileTarget(Target):
    """The tensors of a family's files, its quantized weights in a format.

    Arguments:
        moved: see `Target`.
        store: what their pieces read: fields, and values in float32.
        high_precision: how the family stores the model in high precision; found: the same, with the
            fields of the parameters that are taken over.
        quantizers: of all quantized parameters.
        stacks: the weights that the format stores as they lie in the model.
        details: what the files that the model came from say besides their declaration, if they are of this format.

    Attributes:
        reencoded: parameters of which tensors have other bytes than their fields, once `outputs` was called for them.
    """

    def __init__(
        self,
        moved: Iterable[Output],
        store: Store,
        weight_format: WeightFormat,
        high_precision: Namespace,
        found: FieldNamespace,
        quantizers: Mapping[str, Quantizer],
        stacks: Collection[str],
        details: Mapping[str, Any],
    ) -> None:
        super().__init__(moved)
        self._store, self._format, self._stacks, self._found = store, weight_format, stacks, found
        self._dtypes, self._ones = details.get("dtypes", {}), details.get("ones", {})
        self._numbers: Mapping[str, float] | None = details.get("numbers")
        self._quantizers = quantizers
        self._weights: dict[str, dict[str, None]] = defaultdict(dict)
        for link in high_precision.links:
            self._weights[link.name][link.stored] = None
        self._parameter = {weight: name for name, weights in self._weights.items() for weight in weights}
        self._joined = JoinedAmaxes(weight_format.quantizer)
        self._keys = matrix_keys(high_precision.links, quantizers)
        for weight in stacks:  # one number for all experts
            self._keys[weight] = self._keys[weight][:1] * len(self._keys[weight])
        self.reencoded: set[str] = set()

    def weights(self, parameter: str) -> list[str]:
        return list(self._weights[parameter])

    def fields(self, weight: str) -> list[Output]:
        data = self.moved[weight + self._format.data.suffix]
        packed = field_blocks(self._quantizers[self._parameter[weight]])["data"]
        assert packed is not None, "data has an entry per element or per pair"
        shape = (*data.shape[:-1], data.shape[-1] * packed[1])
        return [self._part(weight, shape, part) for part in self._format.parts]

    def entries(self, weight: str, quantizer: Quantizer) -> list[WrittenTensor]:
        values, entries = self.moved[weight], []
        for part in self._format.parts:
            name, dtype = weight + part.suffix, part.dtypes[0]
            variant = f"{self._format.name} anew {quantizer!r}"
            output = Output(name, dtype, self._shape(part, values.shape), values.pieces, variant=variant, owner=weight)
            encoded = functools.partial(_encode_field, part, self._format.element, dtype, name)
            entries.append(WrittenTensor(SUFFIXES[f"rowwise_{part.field}"], output, encoded))
        return entries

    def values(self, weight: str) -> tuple[Store, Output]:
        return self._store, replace(self.moved[weight], dtype="F32")

    def amaxes_of(self, weight: str) -> AmaxesOf:
        keys, shape = self._keys[weight], self.moved[weight].shape[-2:]
        return lambda number, read: self._joined.add(keys[number], shape, read)

    def finish(self, weight: str, outputs: list[Output]) -> list[Output]:
        if weight not in self._stacks:
            return outputs
        return [_as_stored(self._store, *found, weight) for found in zip(outputs, self._format.parts, strict=True)]

    def number_error(self, parameter: str) -> float:
        """Return the largest relative error of the numbers of a parameter's whole matrices; 0 where it has none."""
        part, errors = self._format.parts[-1], [0.0]
        for name in (weight + part.suffix for weight in self.weights(parameter)):
            if part.meaning in ("factor", "divisor") and name in self.moved:  # else another stands for it
                amax = torch.cat([band.flatten() for _, band in read_bands(self._store, self.moved[name], _BAND)])
                number = encode.written_number(part, amax, name, self._numbers)
                errors.append(encode.number_error(part, amax, number))
        return max(errors)

    def _shape(self, part: Part, weight: Shape) -> Shape:
        """Return the shape in which a part of a weight is written: the number of a whole matrix is a scalar or [1]."""
        shapes = part.shapes(weight)
        return shapes[1] if len(shapes) == 2 and self._ones.get(part.suffix, part.one) else shapes[0]

    def _part(self, weight: str, shape: Shape, part: Part) -> Output:
        name, parameter = weight + part.suffix, self._parameter[weight]
        field, blocks = self.moved[self._found.repeats.get(name, name)], field_blocks(self._quantizers[parameter])
        dtype, block = self._dtypes.get(part.suffix, part.dtypes[0]), blocks[part.field]
        repeat = 1 if part.block is None or block is None else max(1, block[0] // part.block[0])
        every = coarser(part, block, field.shape)
        convert = encode.encoder(part, self._format.element, field.dtype, dtype, name, self._numbers)
        written = self._shape(part, shape)
        if convert is None and (written, dtype, repeat) == (field.shape, field.dtype, 1):
            return replace(field, name=name)
        self.reencoded.add(parameter)
        compute = functools.partial(_encoded, self._store, field, convert, repeat, every, shape[-2])
        return Output(name, dtype, written, field.pieces, compute, f"{self._format.name} {part.suffix}")


def _encoded(
    store: Store,
    field: Output,
    convert: Callable[[torch.Tensor], torch.Tensor] | None,
    repeat: int,
    every: tuple[int, int],
    rows: int,
) -> Iterator[torch.Tensor]:
    """Read a field band after band of its first dimension and encode it.

    repeat: how often an entry is written along the rows. every: the rows and columns of entries of which one is.
    """
    for begin, band in read_bands(store, field, _BAND, multiple=every[0]):
        if every != (1, 1):
            # a copy, because a single entry would keep a stride that its bytes cannot be seen by
            band = band[..., :: every[0], :: every[1]].clone(memory_format=torch.contiguous_format)
        if repeat > 1:
            stop = rows - begin * repeat if len(field.shape) == 2 else rows
            band = band.repeat_interleave(repeat, -2)[..., :stop, :]
        yield band if convert is None else convert(band)


def _encode_field(part: Part, element: str, dtype: str, name: str, field: torch.Tensor) -> torch.Tensor:
    convert = encode.encoder(part, element, dtype_name(field.dtype), dtype, name, None)
    return field if convert is None else convert(field)


def _as_stored(store: Store, output: Output, part: Part, weight: str) -> Output:
    """Return a part of a weight, made as [E, out, in] or [E], as it is written: [E, in, out] or one number."""
    if part.block is None:
        compute, shape = functools.partial(_first, store, output), ()
    else:
        experts, rows, columns = output.shape
        compute, shape = functools.partial(_transposed, store, output), (experts, columns, rows)
    variant = f"{output.variant} as it lies"
    return Output(stacked_name(weight, part), output.dtype, shape, output.pieces, compute, variant, output.owner)


def _parts(store: Store, output: Output) -> Iterable[torch.Tensor]:
    return (
        output.compute() if output.compute is not None else (band for _, band in read_bands(store, output, _STACK_BAND))
    )


def _first(store: Store, output: Output) -> Iterator[torch.Tensor]:
    yield next(iter(_parts(store, output))).flatten()[0].clone()  # all are equal, which is known by now


def _transposed(store: Store, output: Output) -> Iterator[torch.Tensor]:
    """Yield matrix after matrix, from parts that end anywhere between rows."""
    _, rows, columns = output.shape
    matrix, filled = torch.empty(rows * columns, dtype=torch_dtype(output.dtype), device="cpu"), 0
    for part in _parts(store, output):
        flat = part.reshape(-1).view(matrix.dtype)
        while len(flat):
            n = min(len(flat), len(matrix) - filled)
            matrix[filled : filled + n] = flat[:n]
            flat, filled = flat[n:], filled + n
            if filled == len(matrix):
                yield matrix.view(rows, columns).t().contiguous()[None]
                filled = 0
