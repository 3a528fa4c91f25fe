"""Quantize a matrix a band of rows at a time, so that no float32 copy is larger than a band.

Quantizing works in float32, and in several copies: for a whole matrix that is many times what is read or written. A
band ends where a block of the format ends, so its fields are a part of the matrix's, number for number; a scale that
belongs to the whole matrix comes from a first pass over the bands. (Only the Hadamard transform would pad rows, and no
weight gets it.)

Files hold q, k and v, or gate and up, as separate tensors, and our linear layers hold them as one matrix with one
number in some formats (the scale of FP8, the amax of NVFP4). `JoinedAmaxes` quantizes such tensors with the amax of the
whole matrix, so that an import takes over what is written.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from te_models.layers.quantizer import Quantizer, Usage
from te_models.layers.quantizer.encoding import Scale, Uses
from te_models.layers.quantizer.schema import FieldLayout, cut_multiple, field_layouts

from ..io.boxes import Shape
from ..io.threads import in_turn
from ..mapping.tensor_map import Link

BAND_ELEMENTS = 1 << 20
"""Elements of a band, enough that the calls of its dozens of operations cost little, each of which may wait for the
interpreter lock (MXFP8, two cores, processor seconds per GB: 10 with 2^16, 4.9 with 2^18, 3.8 with 2^19, 3.5 with 2^20,
4.2 with 2^22); a matrix that is too wide for it has bands of one block of rows."""

_AHEAD = 4
"""Bands that are being quantized or wait to be taken."""

Rows = tuple[int, int]
"""Begin and end, a part of the rows of a matrix or of one dimension of a field."""

Read = Callable[[int, int], torch.Tensor]
"""Returns rows begin .. end - 1 of a matrix, called with both."""

Amaxes = dict[Usage, torch.Tensor]
"""What parts of one matrix must agree on; empty in a format without a number per matrix."""


def bands(quantizer: Quantizer, shape: Shape, *, decoded: bool = False) -> list[Rows]:
    """Cut the rows of a matrix [rows, columns] between the blocks of the format.

    decoded: for values, in bands of half as many, since values take more memory than what they are quantized to.
    """
    elements = BAND_ELEMENTS // 2 if decoded else BAND_ELEMENTS
    rows, columns = shape
    block = cut_multiple(quantizer, -2)
    step = max(1, elements // max(1, columns * block)) * block
    return [(begin, min(rows, begin + step)) for begin in range(0, rows, step)]


@dataclass
class Matrix:
    """A matrix [rows, columns] to quantize, and the fields that are filled.

    amaxes: see `amaxes_once`; of a larger matrix that it is a part of, or of one that is read again for another copy;
    None: found when they are needed. error: the largest difference between it and what either of its quantized copies
    stands for, if `measure` was asked for.
    """

    read: Read
    fields: Mapping[str, torch.Tensor]
    amaxes: Callable[[Executor | None], Amaxes] | None = None
    error: float = 0.0


def quantize_bands(
    matrices: Sequence[Matrix],
    quantizer: Quantizer,
    shape: Shape,
    pool: Executor | None = None,
    *,
    streamed: str | None = None,
    measure: bool = False,
) -> Iterator[torch.Tensor]:
    """Fill the given fields of matrices of one shape, band after band; nothing happens until this is iterated.

    Arguments:
        pool: threads for several bands at the same time.
        streamed: a field that is yielded, band after band in order, and not filled.
        measure: set each matrix's error.
    """
    layouts = field_layouts(quantizer)
    usages = by_usage(quantizer)

    def fill(matrix: Matrix, band: Rows, amaxes: Amaxes) -> torch.Tensor | None:
        rows, stored = matrix.read(*band), dict[str, torch.Tensor]()
        for copy in usages:
            fields, error = _quantized(copy, rows, amaxes, measure=measure)
            stored |= fields
            matrix.error = max(matrix.error, error)
        for layout in layouts:
            if layout.name in matrix.fields:
                part, out = field_rows(layout, band), matrix.fields[layout.name]
                target = out if part is None else out.narrow(layout.axis(-2), part[0], part[1] - part[0])
                target.copy_(stored[layout.name])
        return None if streamed is None else stored[streamed]

    def tasks() -> Iterator[Callable[[], torch.Tensor | None]]:
        parts = bands(quantizer, shape, decoded=measure)
        for matrix in matrices:
            amaxes = (matrix.amaxes or amaxes_once(quantizer, matrix.read, shape))(pool)
            for band in parts:
                yield functools.partial(fill, matrix, band, amaxes)

    for part in (task() for task in tasks()) if pool is None else in_turn(pool, tasks(), _AHEAD):
        if part is not None:
            yield part


def by_usage(quantizer: Quantizer) -> list[Quantizer]:
    """Return quantizers that make the stored copies one by one."""
    usages = quantizer.stored_usages()
    if len(usages) == 1:
        return [quantizer]
    return [quantizer.with_usage(rowwise=u == "rowwise", columnwise=u == "columnwise") for u in usages]


def _quantized(
    quantizer: Quantizer, rows: torch.Tensor, amaxes: Amaxes, *, measure: bool
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the fields of the one copy that a quantizer makes of a band; measure: and their largest error, else 0."""
    (usage,) = quantizer.stored_usages()
    transpose_quantizer = quantizer.of_transpose() if usage == "columnwise" and not quantizer.symmetric else None
    if transpose_quantizer is not None and _data_layout(quantizer).transposed and rows.numel():
        # the copy is the rowwise one of the transpose: made so, it is compared with what lies in memory as it does
        rows, amaxes = rows.mT.contiguous(), {"rowwise": amaxes["columnwise"]} if amaxes else {}
    else:
        transpose_quantizer = None
    fields, error = _quantize_and_measure(transpose_quantizer or quantizer, rows, amaxes, measure=measure)
    if transpose_quantizer is not None:
        fields = {f"columnwise_{name.removeprefix('rowwise_')}": field for name, field in fields.items()}
    return fields, error


def _quantize_and_measure(
    quantizer: Quantizer, rows: torch.Tensor, amaxes: Amaxes, *, measure: bool
) -> tuple[dict[str, torch.Tensor], float]:
    """Quantize rows into the fields of the one copy that a quantizer makes: in one pass where that is compiled, else by
    the definitions, with the same bits and the same error."""
    found = quantizer.encoded(rows, Scale(None, amaxes), Uses(quantizer.stored_usages(), measured=measure))
    assert found is not None, "only a graph is refused"
    fields = found.fields
    if not measure or not rows.numel():
        return fields, 0.0
    if found.error is not None:
        return fields, found.error
    low, high = torch.aminmax(quantizer.dequantize_fields(fields, torch.float32, rows.shape).contiguous().sub_(rows))
    return fields, float(torch.maximum(-low, high))


def _data_layout(quantizer: Quantizer) -> FieldLayout:
    (usage,) = quantizer.stored_usages()
    return next(layout for layout in field_layouts(quantizer) if layout.name == f"{usage}_data")


def streams(quantizer: Quantizer) -> bool:
    """Whether bands of rows of the one copy that a quantizer makes follow one another in its data."""
    return not _data_layout(quantizer).transposed


def amaxes_once(quantizer: Quantizer, read: Read, shape: Shape) -> Callable[[Executor | None], Amaxes]:
    """Return what finds the amaxes of a matrix when it is first called, given threads; a matrix of one band has none
    that its parts must agree on."""
    found: list[Amaxes] = []

    def amaxes(pool: Executor | None) -> Amaxes:
        if not found:
            parts = [(read, band) for band in bands(quantizer, shape)]
            found.append(amaxes_of(quantizer, parts, pool) if len(parts) > 1 else {})
        return found[0]

    return amaxes


def amaxes_of(quantizer: Quantizer, parts: Sequence[tuple[Read, Rows]], pool: Executor | None) -> Amaxes:
    """Return what bands of one matrix must agree on, from a first pass over them if the format needs one."""

    def of(part: tuple[Read, Rows]) -> Amaxes:
        read, band = part
        return quantizer.amaxes(read(*band))

    amaxes = quantizer.amaxes(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
    if amaxes:
        for found in (map if pool is None else pool.map)(of, parts):
            amaxes |= {usage: torch.maximum(amaxes[usage], amax) for usage, amax in found.items()}
    return amaxes


def field_rows(layout: FieldLayout, band: Rows) -> Rows | None:
    """Return which part of a field a band of rows has; None: there is one entry for the whole matrix."""
    if layout.block is None:
        return None
    rows = layout.block[0]
    return band[0] // rows, -(-band[1] // rows)


Key = tuple[str, int]
"""A parameter and the number of a matrix in it."""


def matrix_keys(links: Iterable[Link], parameters: Container[str]) -> dict[str, list[Key]]:
    """Return where each matrix of the stored weights [out, in] or [E, out, in] of these parameters goes, by weight."""
    keys: dict[str, list[Key]] = {}
    for link in links:
        if link.name in parameters:
            first = link.box[0].start if len(link.box) == 3 else 0
            count = link.stored_box[0].size if len(link.stored_box) == 3 else 1
            keys.setdefault(link.stored, [(link.name, first + member) for member in range(count)])
    return keys


class JoinedAmaxes:
    """The amaxes of the matrices that tensors of files are parts of, found when they are first asked for."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._parts: dict[Key, list[tuple[Read, Rows]]] = defaultdict(list)
        self._found: dict[Key, Amaxes] = {}

    def add(self, key: Key, shape: Shape, read: Read) -> Callable[[Executor | None], Amaxes]:
        """Note a part [rows, columns] of a matrix; return what returns the amaxes of the whole, given threads."""
        self._parts[key] += [(read, band) for band in bands(self._quantizer, shape)]

        def whole(pool: Executor | None) -> Amaxes:
            if key not in self._found:  # two files may both find it, the same
                self._found[key] = amaxes_of(self._quantizer, self._parts[key], pool)
            return self._found[key]

        return whole
