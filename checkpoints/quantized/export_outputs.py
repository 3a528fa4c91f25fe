"""The outputs of a quantized export: moved where they are the same numbers, encoded or requantized where not.

Stacks of experts in a format that stores them as ModelOpt does (`formats/stacks.py`) are put together here, and the
report says what an export does to the numbers. A requantized tensor of the files is quantized by itself, but for the
per-matrix amax, which is that of all tensors that one parameter joins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import torch

from te_models.layers.quantizer import Quantizer

from ..folder.checkpoint import Checkpoint
from ..formats import WeightFormat, encode
from ..formats.format import Part
from ..formats.namespace import FieldNamespace
from ..formats.stacks import stacked_name
from ..formats.views import field_blocks
from ..io.boxes import Shape
from ..io.dtypes import dtype_name, torch_dtype
from ..io.store import Store
from ..plan.plan import Output, Plan
from ..plan.quantized_format import SUFFIXES, quantizer_of
from ..plan.report import ConversionReport, Kind, Measure
from ..plan.stream import cut_pieces, fill_tensor, read_bands
from ..plan.tensor_map import Piece
from .quantize_outputs import field_makers
from .representable import coarser
from .shared_amax import JoinedAmaxes, Key

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


_STACK_BAND = 1 << 20


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
        values = torch.cat([band.flatten() for _, band in read_bands(store, output, _STACK_BAND)])
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
    return (
        output.compute() if output.compute is not None else (band for _, band in read_bands(store, output, _STACK_BAND))
    )


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


def requantized_outputs(
    store: Store,
    weight_format: WeightFormat,
    weight: Output,
    part_shape: Callable[[Part, Shape], Shape],
    threads: Callable[[], Executor],
    measure: Measure,
    joined: JoinedAmaxes,
    keys: Sequence[Key],
) -> list[Output]:
    """Return the parts of one weight in a format.

    Arguments:
        store: what the pieces of `weight` read: values in float32.
        weight: the plain tensor, [out, in] or [E, out, in], that a plan would write.
        part_shape: returns the shape in which a part of a weight is written, see `Encoder.shape`.
        threads: returns those that share the work.
        measure: gets the largest error of each matrix.
        joined: where the parts of a parameter's matrices meet; keys: of which each matrix of `weight` is a part.
    """
    matrices: Sequence[Sequence[Piece]] = [weight.pieces]
    if len(weight.shape) == 3:
        matrices = [list(cut_pieces(weight.pieces, 0, g, g + 1)) for g in range(weight.shape[0])]
    readers = [functools.partial(_rows, store, pieces, len(weight.shape), weight.shape[-1]) for pieces in matrices]
    quantizer = weight_format.quantizer
    amaxes = [joined.add(key, weight.shape[-2:], read) for key, read in zip(keys, readers, strict=True)]
    makers = field_makers(weight.shape, quantizer, readers, threads, measure, amaxes)
    outputs = []
    for part in weight_format.parts:
        shape = part_shape(part, weight.shape)
        name, dtype = weight.name + part.suffix, part.dtypes[0]
        make = makers[SUFFIXES[f"rowwise_{part.field}"]]
        compute = functools.partial(_part, make, part, weight_format.element, dtype, name)
        variant = f"{weight_format.name} anew {quantizer!r}"
        outputs.append(Output(name, dtype, shape, weight.pieces, compute, variant, owner=weight.name))
    return outputs


def _rows(store: Store, pieces: Sequence[Piece], rank: int, columns: int, begin: int, end: int) -> torch.Tensor:
    """Return rows of a matrix; of one in a stack, the pieces are of a stack of one."""
    out = torch.empty((1,) * (rank - 2) + (end - begin, columns))
    fill_tensor(store, list(cut_pieces(pieces, rank - 2, begin, end)), out)
    return out if rank == 2 else out[0]


def _part(
    make: Callable[[], Iterable[torch.Tensor]], part: Part, element: str, dtype: str, name: str
) -> Iterator[torch.Tensor]:
    for field in make():
        convert = encode.encoder(part, element, dtype_name(field.dtype), dtype, name, None)
        yield field if convert is None else convert(field)


_AMAX = SUFFIXES["rowwise_amax"]


def add_moved(
    report: ConversionReport,
    ckpt: Checkpoint,
    found: FieldNamespace,
    weight_format: WeightFormat,
    plain: list[Output],
    encoded: Collection[str],
    imported: Mapping[str, float] | None,
    amaxes: Callable[[str], torch.Tensor],
) -> None:
    """Report the quantized parameters that a format takes over, then the plain ones.

    encoded: the tensors of the format that are computed, not moved. imported: see `encode.written_number`. amaxes:
    reads a parameter's amaxes by the name of their entry.
    """
    owners = found.owners
    inexact = _number_errors(found, weight_format, imported, amaxes)
    computed = {owners[name] for name in encoded if name in owners}
    for name in found.formats:
        meta = ckpt.formats[name]
        kind: Kind = "re-encoded exact" if any(name + s in computed for s in SUFFIXES.values()) else "exact"
        copies = len(quantizer_of(name, meta)[0].stored_usages())
        what = str(meta["format"]) + (" rowwise copy" if copies > 1 else "")
        error = inexact.get(name, 0.0)
        line = report.add(name, "re-encoded" if error else kind, what, weight_format.name)
        if error:
            line.relative = True
            line.note(error)
    for output in plain:
        dtypes = " and ".join(sorted({ckpt.tensors[piece.source].dtype for piece in output.pieces}))
        name = owners.get(output.name, output.name)  # a copy of the embedding has none
        report.add(name, "exact" if dtypes == output.dtype else "converted", dtypes, output.dtype)


def _number_errors(
    found: FieldNamespace,
    weight_format: WeightFormat,
    imported: Mapping[str, float] | None,
    amaxes: Callable[[str], torch.Tensor],
) -> dict[str, float]:
    """Return parameter -> the largest relative error of the numbers of its matrices, where there is one."""
    part = weight_format.parts[-1]
    if part.meaning not in ("factor", "divisor"):
        return {}
    errors: dict[str, float] = {}
    read: dict[str, torch.Tensor] = {}
    for link in found.namespace.links:
        name = link.name.removesuffix(_AMAX)
        if link.name == name or name not in found.formats:
            continue
        if name not in read:
            read = {name: amaxes(link.name)}
        amax = read[name][tuple(r.start for r in link.box)]
        number = encode.written_number(part, amax, link.stored, imported)
        errors[name] = max(errors.get(name, 0.0), encode.number_error(part, amax, number))
    return errors
