"""The fields of a parameter that a conversion quantizes, as outputs of its plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor

import torch

from te_models.layers.quantizer import Quantizer
from te_models.layers.quantizer.schema import empty_fields, field_layouts
from te_models.memory import return_freed_memory

from ..io.boxes import Shape
from ..plan.parameters import Parameters
from ..plan.plan import Output
from ..plan.quantized_format import SUFFIXES, Description, field_specs, quantizer_of
from ..plan.report import Measure
from .row_blocks import BAND_ELEMENTS, Amaxes, Matrix, Read, Rows, amaxes_once, dequantize_bands, quantize_bands


def quantized_outputs(
    name: str,
    shape: Shape,
    meta: Description,
    params: Parameters,
    members: Parameters,
    measure: Measure | None = None,
) -> list[Output]:
    """Return the outputs that hold a parameter quantized as described.

    params, members: where its values are read, in the plan's layout and in the per-GEMM one. measure: gets the largest
    error of each matrix and usage.
    """
    source, names = matrices(params, members, name)
    readers = [_reader(source, matrix) for matrix in names]
    makers = field_makers(shape, quantizer_of(name, meta)[0], readers, lambda: params.threads, measure)
    outputs = []
    for suffix, spec in field_specs(name, shape, meta).items():
        (dtype,) = spec.dtypes
        outputs.append(Output(name + suffix, dtype, spec.shape, compute=makers[suffix]))
    return outputs


def field_makers(
    shape: Shape,
    quantizer: Quantizer,
    readers: Sequence[Read],
    threads: Callable[[], Executor],
    measure: Measure | None,
    amaxes: Sequence[Callable[[Executor | None], Amaxes]] | None = None,
) -> dict[str, Callable[[], Iterable[torch.Tensor]]]:
    """Return, by suffix, functions that compute the fields of a weight; each may be called once.

    Arguments:
        shape: [out, in], or [G, out, in] of a stack whose matrices are quantized one by one.
        readers: the matrices.
        threads: asked for where a weight is large.
        amaxes: return those of larger matrices that the matrices are parts of; None: each has its own.
    """
    makers: dict[str, Callable[[], Iterable[torch.Tensor]]] = {}
    # the copies of both usages share the first pass over a matrix
    amaxes = amaxes or [amaxes_once(quantizer, read, shape[-2:]) for read in readers]
    for q in _by_usage(quantizer):
        fields = _Fields(shape, q, readers, threads, measure, amaxes)
        makers |= {suffix: fields.entry(field) for field, suffix in fields.suffixes()}
    return makers


def _reader(source: Parameters, matrix: str) -> Read:
    return lambda begin, end: source.part(matrix, 0, begin, end)


def matrices(params: Parameters, members: Parameters, name: str) -> tuple[Parameters, list[str]]:
    """Return where to read the matrices of a parameter, which have their own scales, and their names there."""
    return (params, [name]) if len(params.shapes[name]) == 2 else (members, list(params.members(name)))


def value_bands(
    params: Parameters, members: Parameters, name: str, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the values of a quantized parameter band after band, each with the name of its matrix; see `matrices`."""
    quantizer, _ = quantizer_of(name, params.formats[name])
    source, names = matrices(params, members, name)
    for matrix in names:

        def read(field: str, axis: int, part: Rows | None, matrix: str = matrix) -> torch.Tensor:
            entry = matrix + SUFFIXES[field]
            return source.entry(entry) if part is None else source.part(entry, axis, *part)

        for band in dequantize_bands(quantizer, params.shapes[name][-2:], dtype, read):
            yield matrix, band


def _by_usage(quantizer: Quantizer) -> list[Quantizer]:
    """Return quantizers that make the stored copies one by one."""
    usages = quantizer.stored_usages()
    if len(usages) == 1:
        return [quantizer]
    return [quantizer.with_usage(rowwise=u == "rowwise", columnwise=u == "columnwise") for u in usages]


class _Fields:
    """The fields of one parameter.

    Its data is written band after band as it is computed, where its bands follow one another in the field; the other
    fields, small ones, are kept until they are written. Otherwise (of a transposed copy a band is columns) all fields
    are computed when the first is written, and each is dropped when it has been.
    """

    def __init__(
        self,
        shape: Shape,
        quantizer: Quantizer,
        readers: Sequence[Read],
        threads: Callable[[], Executor],
        measure: Measure | None,
        amaxes: Sequence[Callable[[Executor | None], Amaxes]],
    ) -> None:
        self._shape, self._quantizer, self._readers, self._amaxes = shape, quantizer, readers, amaxes
        self._threads, self._measure = threads, measure
        self._ready: dict[str, torch.Tensor] = {}
        (usage,) = quantizer.stored_usages()
        self._data = f"{usage}_data"
        layouts = {layout.name: layout for layout in field_layouts(quantizer)}
        self._streams = not layouts[self._data].transposed

    def suffixes(self) -> Iterator[tuple[str, str]]:
        """List the fields, each with what its entry's name adds to the parameter's."""
        return ((field, SUFFIXES[field]) for field in self._quantizer.field_names())

    def entry(self, field: str) -> Callable[[], Iterable[torch.Tensor]]:
        """Return the function that computes one field; each may be called once."""
        return functools.partial(self._stream if self._streams and field == self._data else self._whole, field)

    def _stream(self, field: str) -> Iterator[torch.Tensor]:
        fields = empty_fields(self._quantizer, torch.Size(self._shape), "meta")
        small = {name: torch.empty_like(f, device="cpu") for name, f in fields.items() if name != field}
        yield from self._quantize(small, field)
        self._ready = small

    def _whole(self, field: str) -> list[torch.Tensor]:
        if field not in self._ready:
            fields = empty_fields(self._quantizer, torch.Size(self._shape), "cpu")
            if self._streams:
                del fields[self._data]  # in another file than this field, which is there already or comes later
            for _ in self._quantize(fields):
                pass
            self._ready = fields
        return [self._ready.pop(field)]

    def _quantize(self, fields: dict[str, torch.Tensor], streamed: str | None = None) -> Iterator[torch.Tensor]:
        large = math.prod(self._shape) >= 2 * BAND_ELEMENTS
        if large and streamed is None:
            return_freed_memory()  # of the parameter before
        # each matrix has its own scales, so this is what quantizing the whole stack gives
        stacked = len(self._shape) > 2
        matrices = [
            Matrix(read, {name: field[g] if stacked else field for name, field in fields.items()}, amaxes)
            for g, (read, amaxes) in enumerate(zip(self._readers, self._amaxes, strict=True))
        ]
        pool, measure = self._threads() if large else None, self._measure is not None
        yield from quantize_bands(matrices, self._quantizer, self._shape[-2:], pool, streamed=streamed, measure=measure)
        if self._measure is not None:
            for matrix in matrices:
                self._measure(matrix.error)
