"""The vocabulary of weight maps: how one canonical tensor is laid out in a family's files.

A weight map says `canonical name -> expression`, and an expression says where the parts of that tensor are stored:

    Stored tensor as it is      At("model.norm.weight")
    q | k | v in one tensor     Concat((At("...q_proj.weight"), 4096), (At("...k_proj.weight"), 1024), ...)
    one tensor per expert       Stack(At("...experts.0.w2.weight"), At("...experts.1.w2.weight"), ...)
    stored as [in, out]         Transpose(At("...c_attn.weight"))
    stored as g0 u0 g1 u1 ...   Deinterleaved("...gate_up_proj_bias", parts=2, dim=1)
    some rows of a tensor       Rows("...query_key_value.weight", begin=64, total=192)
    some columns of it          Columns("...embed_tokens_per_layer.weight", begin=256, total=8960)
    with a dimension in front   Unsqueezed("...e_score_correction_bias")
    a vector stored as [n, d]   Folded("...q_norm.weight", 32)

Expressions are values without a direction: `place` lists which part of the canonical tensor is which part of which
stored tensor, and reading the list from either side is import or export. Shapes follow from the canonical tensor and
the declared sizes; orientation is declared, never guessed from shapes.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from te_models.sizes import plural

from ..io.boxes import Box, Range, Shape, full, shift
from ..io.errors import CheckpointError

Axes = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A part of the canonical tensor and its place, `stored[stored_box]`, in a tensor of shape `stored_shape`."""

    box: Box
    stored: str
    stored_box: Box
    stored_shape: Shape
    axes: Axes


class Layout(Protocol):
    """An expression of a weight map."""

    def place(self, shape: Shape) -> Iterator[Placed]:
        """List the parts of a canonical tensor of this shape and where they are stored."""
        ...


@dataclass(frozen=True)
class At:
    """The whole tensor, stored under `name`."""

    name: str

    def place(self, shape: Shape) -> Iterator[Placed]:
        whole = full(shape)
        yield Placed(whole, self.name, whole, shape, tuple(range(len(shape))))


@dataclass(frozen=True, init=False)
class Concat:
    """Parts one after the other along dimension `dim`, each with its size there."""

    parts: tuple[tuple[Layout, int], ...]
    dim: int

    def __init__(self, *parts: tuple[Layout, int], dim: int = 0) -> None:
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "dim", dim)

    def place(self, shape: Shape) -> Iterator[Placed]:
        d = self.dim
        if sum(size for _, size in self.parts) != shape[d]:
            raise CheckpointError(
                f"a concatenation of {[size for _, size in self.parts]} rows cannot fill {list(shape)}"
            )
        offset = 0
        for part, size in self.parts:
            for p in part.place((*shape[:d], size, *shape[d + 1 :])):
                yield Placed(shift(p.box, d, offset), p.stored, p.stored_box, p.stored_shape, p.axes)
            offset += size


@dataclass(frozen=True, init=False)
class Stack:
    """Equal parts, each without dimension 0, one per index of dimension 0 (experts)."""

    parts: tuple[Layout, ...]

    def __init__(self, *parts: Layout) -> None:
        object.__setattr__(self, "parts", parts)

    def place(self, shape: Shape) -> Iterator[Placed]:
        if len(self.parts) != shape[0]:
            raise CheckpointError(f"a stack of {plural(len(self.parts), 'tensor')} cannot fill {list(shape)}")
        for number, part in enumerate(self.parts):
            for p in part.place(shape[1:]):
                yield Placed(_member(number, p.box), p.stored, p.stored_box, p.stored_shape, _behind(p.axes))


@functools.lru_cache(1 << 14)
def _member(number: int, box: Box) -> Box:
    """Return the box in a stack of one in its member: layers have the same ones, so that they are in memory once."""
    return (Range(number, number + 1), *box)


@functools.lru_cache
def _behind(axes: Axes) -> Axes:
    """Return the axes of a tensor that has a dimension before its own."""
    return tuple(None if axis is None else axis + 1 for axis in axes)


@dataclass(frozen=True)
class Transpose:
    """The last two dimensions are stored swapped."""

    inner: Layout

    def place(self, shape: Shape) -> Iterator[Placed]:
        n = len(shape)
        swapped = {n - 2: n - 1, n - 1: n - 2}
        for p in self.inner.place((*shape[:-2], shape[-1], shape[-2])):
            box = (*p.box[:-2], p.box[-1], p.box[-2])
            axes = tuple(axis if axis is None else swapped.get(axis, axis) for axis in p.axes)
            yield Placed(box, p.stored, p.stored_box, p.stored_shape, axes)


@dataclass(frozen=True)
class Deinterleaved:
    """`parts` equal blocks along `dim`, stored element by element in turn (gate, up, gate, up, ...)."""

    name: str
    parts: int
    dim: int

    def place(self, shape: Shape) -> Iterator[Placed]:
        d, n = self.dim, shape[self.dim]
        if n % self.parts:
            raise CheckpointError(f"{self.name}: {n} is not a multiple of {plural(self.parts, 'interleaved part')}")
        size, whole = n // self.parts, full(shape)
        for number in range(self.parts):
            box = (*whole[:d], Range(number * size, (number + 1) * size), *whole[d + 1 :])
            strided = (*whole[:d], Range(number, number + n, self.parts), *whole[d + 1 :])
            yield Placed(box, self.name, strided, shape, tuple(range(len(shape))))


@dataclass(frozen=True)
class Rows:
    """Rows `begin` and following of a stored tensor of `total` rows; other expressions account for its other rows."""

    name: str
    begin: int
    total: int

    def place(self, shape: Shape) -> Iterator[Placed]:
        whole, stored_shape = full(shape), (self.total, *shape[1:])
        yield Placed(whole, self.name, shift(whole, 0, self.begin), stored_shape, tuple(range(len(shape))))


@dataclass(frozen=True)
class Columns:
    """Columns `begin` and following of a stored matrix of `total` columns; other expressions account for the others."""

    name: str
    begin: int
    total: int

    def place(self, shape: Shape) -> Iterator[Placed]:
        whole, stored_shape = full(shape), (*shape[:-1], self.total)
        yield Placed(whole, self.name, shift(whole, len(shape) - 1, self.begin), stored_shape, tuple(range(len(shape))))


@dataclass(frozen=True)
class Folded:
    """A vector, stored as a matrix of `rows` rows."""

    name: str
    rows: int

    def place(self, shape: Shape) -> Iterator[Placed]:
        size, rest = divmod(shape[0], self.rows)
        if rest:
            raise CheckpointError(f"{self.name}: {shape[0]} is not a multiple of {self.rows} rows")
        for row in range(self.rows):
            box, stored_box = (Range(row * size, (row + 1) * size),), (Range(row, row + 1), Range(0, size))
            yield Placed(box, self.name, stored_box, (self.rows, size), (None, 0))


@dataclass(frozen=True)
class Unsqueezed:
    """The whole tensor, stored with an additional dimension `dim` of size 1, or with several, in rising order."""

    name: str
    dim: int | tuple[int, ...] = 0

    def place(self, shape: Shape) -> Iterator[Placed]:
        axes: list[int | None] = [*range(len(shape))]
        stored = [*shape]
        for dim in (self.dim,) if isinstance(self.dim, int) else self.dim:
            axes.insert(dim, None)
            stored.insert(dim, 1)
        yield Placed(full(shape), self.name, full(tuple(stored)), tuple(stored), tuple(axes))
