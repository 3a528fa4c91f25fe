"""A quantized Hugging Face folder as the target of a conversion: a quantized weight is one tensor per part of a format.

The fields of a parameter that the format takes over are moved where a part has the same bytes, and encoded on the way
where it has not (packed, in another dtype, the inverse). Stacks of experts that a format stores as ModelOpt does
(`formats/stacks.py`) are transposed last. A requantized tensor of the files is quantized by itself, but for the
per-matrix amax, taken over all tensors that one parameter joins.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from te_models.layers.quantizer import Quantizer

from ..formats import WeightFormat, encode
from ..formats.details import detail_key
from ..formats.format import Part
from ..formats.fp8 import scale_in_files
from ..formats.namespace import FieldNamespace
from ..formats.packed_columns import as_columns
from ..formats.stacks import stacked_name
from ..formats.views import field_blocks
from ..io.boxes import Shape
from ..io.dtypes import dtype_name, torch_dtype
from ..io.store import Store
from ..mapping.plan import OutputTensor
from ..mapping.quantized_format import SUFFIXES
from ..mapping.stream import read_bands
from ..mapping.tensor_map import Namespace
from .representable import coarser
from .requantize import AmaxesOf, WrittenTensor
from .route import WriteTarget
from .row_blocks import JoinedAmaxes, matrix_keys

_BAND = 1 << 22
_STACK_BAND = 1 << 20


class FileTarget(WriteTarget):
    """The tensors of a family's files, its quantized weights in a format.

    Arguments:
        moved: see `WriteTarget`.
        store: what their pieces read: fields, and values in float32.
        high_precision: how the family stores the model in high precision; found: the same, with the
            fields of the parameters that are taken over.
        quantizers: of all quantized parameters.
        formats: stored weight -> its format; declared: all formats, in the order of the declaration.
        stacks: the weights that the format stores as they lie in the model.
        details: what the files that the model came from say besides their declaration, if they are of this format.

    Attributes:
        reencoded: parameters of which tensors have other bytes than their fields, once `outputs` was called for them.
    """

    def __init__(
        self,
        moved: Iterable[OutputTensor],
        store: Store,
        formats: Mapping[str, WeightFormat],
        declared: Sequence[WeightFormat],
        high_precision: Namespace,
        found: FieldNamespace,
        quantizers: Mapping[str, Quantizer],
        stacks: Collection[str],
        details: Mapping[str, Any],
    ) -> None:
        super().__init__(moved)
        self._store, self._formats, self._stacks, self._found = store, formats, stacks, found
        self._number = {form: number for number, form in enumerate(declared)}
        self._dtypes, self._ones = details.get("dtypes", {}), details.get("ones", {})
        self._numbers: Mapping[str, float] | None = details.get("numbers")
        self._scales: str | None = details.get("scales")
        self._quantizers = quantizers
        self._weights: dict[str, dict[str, None]] = defaultdict(dict)
        for link in high_precision.links:
            self._weights[link.name][link.stored] = None
        self._parameter = {weight: name for name, weights in self._weights.items() for weight in weights}
        self._joined = {form: JoinedAmaxes(form.quantizer) for form in declared if form.storages}
        self._shapes = {weight: high_precision.stored[weight].shape for weight in formats}
        self._keys = matrix_keys(high_precision.links, quantizers)
        for weight in stacks:  # one number for all experts
            self._keys[weight] = self._keys[weight][:1] * len(self._keys[weight])
        self.reencoded: set[str] = set()

    def weights(self, parameter: str) -> list[str]:
        return list(self._weights[parameter])

    def fields(self, weight: str) -> list[OutputTensor]:
        form = self._formats[weight]
        data = self.moved[weight + form.data.suffix]
        packed = field_blocks(self._quantizers[self._parameter[weight]])["data"]
        assert packed is not None, "data has an entry per element or per pair"
        shape = (*data.shape[:-1], data.shape[-1] * packed[1])
        return [*(self._part(weight, shape, part) for part in form.parts), *self._beside(weight, shape)]

    def entries(self, weight: str, quantizer: Quantizer) -> list[WrittenTensor]:
        values, entries, form = self.moved[weight], list[WrittenTensor](), self._formats[weight]
        for part in form.parts:
            name, dtype = weight + part.suffix, part.dtypes[0]
            if form.integers and part.meaning == "scale":
                dtype = dtype_name(quantizer.part_dtype("scale_inv") or torch.float32)
            variant = f"{form.name} anew {quantizer!r}"
            output = OutputTensor(
                name, dtype, self._shape(form, part, values.shape), values.pieces, variant=variant, owner=weight
            )
            encoded = functools.partial(_encode_field, part, form.element, dtype, name)
            entries.append(WrittenTensor(SUFFIXES[f"rowwise_{part.field}"], output, encoded))
        return entries

    def values(self, weight: str) -> tuple[Store, OutputTensor]:
        return self._store, replace(self.moved[weight], dtype="F32")

    def amaxes_of(self, weight: str) -> AmaxesOf:
        keys, shape, joined = self._keys[weight], self.moved[weight].shape[-2:], self._joined[self._formats[weight]]
        return lambda number, read: joined.add(keys[number], shape, read)

    def finish(self, weight: str, outputs: list[OutputTensor]) -> list[OutputTensor]:
        form = self._formats[weight]
        if len(outputs) == len(form.parts) and form.beside:  # computed again
            outputs = [*outputs, *self._beside(weight, self._shapes[weight])]
        if form.packing is not None:
            return as_columns(weight, form.packing, outputs, functools.partial(_parts, self._store))
        if self._scales is not None:
            outputs = [replace(output, name=scale_in_files(output.name)) for output in outputs]
        if weight not in self._stacks:
            return outputs
        return [_as_stored(self._store, *found, weight) for found in zip(outputs, form.parts, strict=True)]

    def number_error(self, parameter: str) -> float:
        """Return the largest relative error of the numbers of a parameter's whole matrices; 0 where it has none."""
        errors = [0.0]
        for weight in self.weights(parameter):
            part = self._formats[weight].parts[-1]
            name = weight + part.suffix
            if part.meaning in ("factor", "divisor") and name in self.moved:  # else another stands for it
                amax = torch.cat([band.flatten() for _, band in read_bands(self._store, self.moved[name], _BAND)])
                number = encode.written_number(part, amax, name, self._numbers)
                errors.append(encode.number_error(part, amax, number))
        return max(errors)

    def _beside(self, weight: str, shape: Shape) -> list[OutputTensor]:
        """Return the tensors beside a weight of a shape that follow from it."""
        form, found = self._formats[weight], list[OutputTensor]()
        for beside in form.beside:
            dtype = self._dtypes.get(self._key(form, beside.suffix), beside.dtypes[0] if beside.required else None)
            if dtype is not None:
                value = beside.value(shape).to(torch_dtype(dtype))
                found.append(
                    OutputTensor(weight + beside.suffix, dtype, tuple(value.shape), compute=lambda v=value: [v])
                )
        return found

    def _key(self, form: WeightFormat, suffix: str) -> str:
        return detail_key(self._number[form], suffix)

    def _shape(self, form: WeightFormat, part: Part, weight: Shape) -> Shape:
        """Return the shape in which a part of a weight is written: the number of a whole matrix is a scalar or [1]."""
        shapes = part.shapes(weight)
        one = self._ones.get(self._key(form, part.suffix), part.one)
        return shapes[1] if len(shapes) == 2 and one else shapes[0]

    def _part(self, weight: str, shape: Shape, part: Part) -> OutputTensor:
        name, parameter, form = weight + part.suffix, self._parameter[weight], self._formats[weight]
        field, blocks = self.moved[self._found.repeats.get(name, name)], field_blocks(self._quantizers[parameter])
        dtype, block = self._dtypes.get(self._key(form, part.suffix), part.dtypes[0]), blocks[part.field]
        dtype = field.dtype if form.integers and part.meaning == "scale" else dtype
        repeat = 1 if part.block is None or block is None else max(1, block[0] // part.block[0])
        every = coarser(part, block, field.shape)
        convert = encode.encoder(part, form.element, field.dtype, dtype, name, self._numbers)
        written = self._shape(form, part, shape)
        if convert is None and (written, dtype, repeat) == (field.shape, field.dtype, 1):
            return replace(field, name=name)
        if not form.integers or form.packing is not None:
            self.reencoded.add(parameter)  # words have the bytes of the fields
        multiple = part.block[0] if part.meaning == "zero" and part.block else every[0]
        compute = functools.partial(_encoded, self._store, field, convert, repeat, every, shape[-2], multiple)
        return OutputTensor(name, dtype, written, field.pieces, compute, f"{form.name} {part.suffix}")


def _encoded(
    store: Store,
    field: OutputTensor,
    convert: Callable[[torch.Tensor], torch.Tensor] | None,
    repeat: int,
    every: tuple[int, int],
    rows: int,
    multiple: int,
) -> Iterator[torch.Tensor]:
    """Read a field band after band of its first dimension and encode it.

    repeat: how often an entry is written along the rows. every: the rows and columns of entries of which one is.
    """
    for begin, band in read_bands(store, field, _BAND, multiple=multiple):
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


def _as_stored(store: Store, output: OutputTensor, part: Part, weight: str) -> OutputTensor:
    """Return a part of a weight, made as [E, out, in] or [E], as it is written: [E, in, out] or one number."""
    if part.block is None:
        compute, shape = functools.partial(_first, store, output), ()
    else:
        experts, rows, columns = output.shape
        compute, shape = functools.partial(_transposed, store, output), (experts, columns, rows)
    variant = f"{output.variant} as it lies"
    return OutputTensor(stacked_name(weight, part), output.dtype, shape, output.pieces, compute, variant, output.owner)


def _parts(store: Store, output: OutputTensor) -> Iterable[torch.Tensor]:
    return (
        output.compute() if output.compute is not None else (band for _, band in read_bands(store, output, _STACK_BAND))
    )


def _first(store: Store, output: OutputTensor) -> Iterator[torch.Tensor]:
    yield next(iter(_parts(store, output))).flatten()[0].clone()  # all are equal, which is known by now


def _transposed(store: Store, output: OutputTensor) -> Iterator[torch.Tensor]:
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
