"""The fields of a parameter that a conversion quantizes, as outputs of its plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from te_models.layers.field_schema import empty_fields
from te_models.layers.quantizer import Quantizer
from te_models.memory import return_freed_memory

from .bands import BAND_ELEMENTS, Map, Rows, bands, dequantize_bands, quantize_into
from .boxes import Shape
from .conversion_report import Measure
from .parameters import MAX_THREADS, Parameters
from .plan import Output
from .quantized_format import SUFFIXES, Description, field_specs, quantizer_of

Read = Callable[[int, int], torch.Tensor]
"""Returns rows begin .. end - 1 of a matrix, called with both."""


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
    makers = field_makers(shape, quantizer_of(name, meta)[0], readers, lambda: params.threads.map, measure)
    outputs = []
    for suffix, spec in field_specs(name, shape, meta).items():
        (dtype,) = spec.dtypes
        outputs.append(Output(name + suffix, dtype, spec.shape, compute=makers[suffix]))
    return outputs


def field_makers(
    shape: Shape,
    quantizer: Quantizer,
    readers: Sequence[Read],
    threads: Callable[[], Map],
    measure: Measure | None,
) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Return, by suffix, functions that compute the fields of a weight; each may be called once.

    Arguments:
        shape: [out, in], or [G, out, in] of a stack whose matrices are quantized one by one.
        readers: the matrices.
        threads: returns a `map` that shares its work out; asked for where a weight is large.
    """
    makers: dict[str, Callable[[], list[torch.Tensor]]] = {}
    for q in _by_usage(quantizer):
        fields = _Fields(shape, q, readers, threads, measure)
        makers |= {suffix: fields.entry(field) for field, suffix in fields.suffixes()}
    return makers


def _reader(source: Parameters, matrix: str) -> Read:
    return lambda begin, end: source.part(matrix, 0, begin, end)


def matrices(params: Parameters, members: Parameters, name: str) -> tuple[Parameters, list[str]]:
    """Return where to read the matrices of a parameter, which have their own scales, and their names there."""
    return (params, [name]) if len(params.shapes[name]) == 2 else (members, list(params.members(name)))


def _by_usage(quantizer: Quantizer) -> list[Quantizer]:
    """Return quantizers that make the stored copies one by one."""
    usages = quantizer.stored_usages()
    if len(usages) == 1:
        return [quantizer]
    return [quantizer.with_usage(rowwise=u == "rowwise", columnwise=u == "columnwise") for u in usages]


class _Fields:
    """The fields of one parameter, quantized when the first is written and dropped when the last one has been."""

    def __init__(
        self,
        shape: Shape,
        quantizer: Quantizer,
        readers: Sequence[Read],
        threads: Callable[[], Map],
        measure: Measure | None,
    ) -> None:
        self._shape, self._quantizer, self._readers = shape, quantizer, readers
        self._threads, self._measure = threads, measure
        self._ready: dict[str, torch.Tensor] = {}

    def suffixes(self) -> Iterator[tuple[str, str]]:
        """List the fields, each with what its entry's name adds to the parameter's."""
        return ((field, SUFFIXES[field]) for field in self._quantizer.field_names())

    def entry(self, field: str) -> Callable[[], list[torch.Tensor]]:
        """Return the function that computes one field; each may be called once."""

        def compute() -> list[torch.Tensor]:
            if not self._ready:
                self._ready = self._quantize()
            return [self._ready.pop(field)]

        return compute

    def _quantize(self) -> dict[str, torch.Tensor]:
        large = math.prod(self._shape) >= 4 * BAND_ELEMENTS
        if large:
            return_freed_memory()  # of the parameter before
        fields = empty_fields(self._quantizer, torch.Size(self._shape), "cpu")
        # each matrix has its own scales, so this is what quantizing the whole stack gives
        count = len(self._readers)
        parts = [fields] if len(self._shape) == 2 else [{f: v[g] for f, v in fields.items()} for g in range(count)]

        def fill(read: Read, own: dict[str, torch.Tensor], run: Map = map) -> None:
            quantize_into(own, self._quantizer, self._shape[-2:], read, run)
            if self._measure is not None:
                self._measure(quantization_error(own, self._quantizer, self._shape[-2:], read))

        run = self._threads() if large else map
        if count < MAX_THREADS:  # few matrices, whose bands are shared out; otherwise whole matrices are
            for read, own in zip(self._readers, parts):
                fill(read, own, run)
        else:
            for _ in run(lambda matrix: fill(*matrix), list(zip(self._readers, parts))):
                pass
        return fields


def quantization_error(fields: dict[str, torch.Tensor], quantizer: Quantizer, shape: Shape, read: Read) -> float:
    """Return the largest difference between a matrix [rows, columns] and what its fields stand for."""

    def part(field: str, axis: int, rows: Rows | None) -> torch.Tensor:
        return fields[field] if rows is None else fields[field].narrow(axis, rows[0], rows[1] - rows[0])

    worst = 0.0
    values = dequantize_bands(quantizer, shape, torch.float32, part)
    for (begin, end), value in zip(bands(quantizer, shape), values, strict=True):
        difference = (value - read(begin, end).float()).abs()
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
    return worst
