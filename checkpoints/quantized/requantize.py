"""Quantizing a weight from its values: what its tensors are computed by, as outputs of a plan."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch

from te_models.layers.quantizer import Quantizer
from te_models.layers.quantizer.schema import empty_fields
from te_models.memory import return_freed_memory

from ..io.boxes import Shape
from ..io.store import Store
from ..mapping.plan import OutputTensor
from ..mapping.quantized_format import SUFFIXES, Description, field_specs
from ..mapping.report import Measure
from ..mapping.stream import matrices, read_rows
from .row_blocks import BAND_ELEMENTS, Amaxes, Matrix, Read, amaxes_once, by_usage, quantize_bands, streams

Make = Callable[[], Iterable[torch.Tensor]]
"""Computes one field in parts along its first dimension; may be called once."""

AmaxesOf = Callable[[int, Read], Callable[[Executor | None], Amaxes]]
"""(number of a matrix, what reads it) -> what returns the amaxes of the whole that it is a part of, given threads."""


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor that a quantized weight is written as.

    suffix: of the field of ours that it holds. output: without what computes it. encode: turns a part of the field into
    a part of the tensor; None: they are the same.
    """

    suffix: str
    output: OutputTensor
    encode: Callable[[torch.Tensor], torch.Tensor] | None = None


def field_entries(name: str, shape: Shape, meta: Description) -> list[WrittenTensor]:
    """Return the entries of a parameter in a folder of ours: its fields."""
    specs = field_specs(name, shape, meta).items()
    return [WrittenTensor(suffix, OutputTensor(name + suffix, min(spec.dtypes), spec.shape)) for suffix, spec in specs]


def requantized_outputs(
    store: Store,
    weight: OutputTensor,
    quantizer: Quantizer,
    entries: Iterable[WrittenTensor],
    threads: Callable[[], Executor],
    measure: Measure | None = None,
    amaxes_of: AmaxesOf | None = None,
) -> list[OutputTensor]:
    """Return the tensors that hold a weight quantized from its values.

    Arguments:
        store: what the pieces of `weight` read.
        weight: the values, [out, in] or a stack [G, out, in] whose matrices are quantized one by one; in its dtype.
        threads: returns those that share the work; asked for where a weight is large.
        measure: gets the largest error of each matrix and usage.
        amaxes_of: of larger matrices that the matrices are parts of; None: each has its own.
    """
    readers: list[Read] = [functools.partial(read_rows, store, matrix) for matrix in matrices(weight)]
    if amaxes_of is None:  # the copies of both usages share the first pass over a matrix
        amaxes = [amaxes_once(quantizer, read, weight.shape[-2:]) for read in readers]
    else:
        amaxes = [amaxes_of(number, read) for number, read in enumerate(readers)]
    makers: dict[str, Make] = {}
    for q in _passes(quantizer):
        fields = _Fields(weight.shape, q, readers, threads, measure, amaxes)
        makers |= {suffix: fields.entry(field) for field, suffix in fields.suffixes()}
    return [replace(e.output, compute=_encoded(makers[e.suffix], e.encode)) for e in entries]


def _encoded(make: Make, encode: Callable[[torch.Tensor], torch.Tensor] | None) -> Make:
    return make if encode is None else lambda: map(encode, make())


def _passes(quantizer: Quantizer) -> list[Quantizer]:
    """Return the quantizers of one pass over the values each: a copy of which all fields are in memory is made together
    with the one before it, so that values are read, and decoded, once for both."""
    copies = by_usage(quantizer)
    return copies if all(map(streams, copies)) or not streams(copies[0]) else [quantizer]


@dataclass
class _Fields:
    """The fields of one parameter that are computed in one pass.

    The data of the first copy is written band after band as it is computed, where its bands follow one another in the
    field; the other fields, a transposed copy's and small ones, are kept until they are written. Otherwise (of a
    transposed copy a band is columns) all fields are computed when the first is written, and each is dropped when it
    has been.
    """

    shape: Shape
    quantizer: Quantizer
    readers: Sequence[Read]
    threads: Callable[[], Executor]
    measure: Measure | None
    amaxes: Sequence[Callable[[Executor | None], Amaxes]]

    def __post_init__(self) -> None:
        self._ready: dict[str, torch.Tensor] = {}
        self._data = f"{self.quantizer.stored_usages()[0]}_data"
        self._streams = streams(by_usage(self.quantizer)[0])

    def suffixes(self) -> Iterator[tuple[str, str]]:
        """List the fields, each with what its entry's name adds to the parameter's."""
        return ((field, SUFFIXES[field]) for field in self.quantizer.field_names())

    def entry(self, field: str) -> Callable[[], Iterable[torch.Tensor]]:
        """Return the function that computes one field; each may be called once."""
        return functools.partial(self._stream if self._streams and field == self._data else self._whole, field)

    def _stream(self, field: str) -> Iterator[torch.Tensor]:
        fields = empty_fields(self.quantizer, torch.Size(self.shape), "meta")
        small = {name: torch.empty_like(f, device="cpu") for name, f in fields.items() if name != field}
        yield from self._quantize(small, field)
        self._ready = small

    def _whole(self, field: str) -> list[torch.Tensor]:
        if field not in self._ready:
            fields = empty_fields(self.quantizer, torch.Size(self.shape), "cpu")
            if self._streams:
                del fields[self._data]  # in another file than this field, written already or later
            for _ in self._quantize(fields):
                pass
            self._ready = fields
        return [self._ready.pop(field)]

    def _quantize(self, fields: dict[str, torch.Tensor], streamed: str | None = None) -> Iterator[torch.Tensor]:
        large = math.prod(self.shape) >= 2 * BAND_ELEMENTS
        if large and streamed is None:
            return_freed_memory()  # of the parameter before
        # each matrix has its own scales, so this is what quantizing the whole stack gives
        stacked = len(self.shape) > 2
        parts = [
            Matrix(read, {name: field[g] if stacked else field for name, field in fields.items()}, amaxes)
            for g, (read, amaxes) in enumerate(zip(self.readers, self.amaxes, strict=True))
        ]
        pool, measure = self.threads() if large else None, self.measure is not None
        yield from quantize_bands(parts, self.quantizer, self.shape[-2:], pool, streamed=streamed, measure=measure)
        if self.measure is not None:
            for matrix in parts:
                self.measure(matrix.error)
