"""Adapters of weights that are divided in other ways: from our weights to the weights of files, and back.

A weight of ours that is several in a file, such as q, k and v, has rows of each. An adapter of it becomes one for each
part; they share A and divide the rows of B. The adapters of the parts become one of ours whose rank is the sum of
theirs: A is theirs one below the other, and B has a block for each. Parts with the same A share its rows, and
a part leaves out the columns in which B has numbers for other parts only: so both ways undo each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from te_models.checkpoints.io.boxes import slices
from te_models.checkpoints.io.store import MemoryStore
from te_models.checkpoints.mapping.plan import ConversionPlan, OutputTensor
from te_models.checkpoints.mapping.stream import carry_out

if TYPE_CHECKING:
    from te_models.checkpoints.mapping.tensor_map import Link, Namespace, Piece

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Factors:
    """An adapter of one weight, `scaling * b @ a`. a: [..., r, in]; b: [..., out, r]; lengths: DoRA's,
    [..., out], NaN for rows without adapter."""

    a: Tensor
    b: Tensor
    scaling: float
    lengths: Tensor | None = None

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[-2]

    @property
    def alpha(self) -> float:
        """What, divided by the rank, is the scaling."""
        return self.scaling * self.rank

    def transposed(self) -> Factors:
        """Return the adapter of the transposed weights."""
        return replace(self, a=self.b.transpose(-2, -1), b=self.a.transpose(-2, -1))

    def product(self) -> Tensor:
        """Return what the adapter adds to its weight."""
        return (self.b @ self.a) * self.scaling


@dataclass(frozen=True)
class WeightRows:
    """Some rows of one weight in two places. source, target: of which weight; the slices say which experts, if it is a
    stack, and which rows."""

    source: str
    source_experts: Slices
    source_rows: slice
    target: str
    target_experts: Slices
    target_rows: slice


def rows_of_link(link: Link, namespace: Namespace, *, to_stored: bool) -> WeightRows:
    """Return the rows of a link, from our weight to the stored one or back. Raises ValueError for a link that does not
    have all input features."""
    own, theirs = slices(link.box), slices(link.stored_box)
    *lead, rows, columns = range(len(own))
    shape = namespace.stored[link.stored].shape
    if own[columns] != slice(0, namespace.canonical[link.name][columns], 1):
        raise ValueError(f"{link.stored} has some input features of a layer; allowed: weights with all of them")
    canonical = link.name, own[: len(lead)], own[rows]
    stored = link.stored, theirs[: len(shape) - 2], theirs[link.axes.index(rows)]
    return WeightRows(*canonical, *stored) if to_stored else WeightRows(*stored, *canonical)


def links_by_stored(namespace: Namespace) -> dict[str, list[Link]]:
    """Return the links of each stored tensor."""
    found: dict[str, list[Link]] = defaultdict(list)
    for link in namespace.links:
        found[link.stored].append(link)
    return found


def filled_tensors(
    values: Mapping[str, Tensor], pieces: Mapping[str, Sequence[Piece]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return the tensors that pieces of `values` fill, by name: views of one, or new ones of the dtype of the first."""
    store = MemoryStore(values)
    outputs = (OutputTensor(n, store.tensors[own[0].source].dtype, shapes[n], tuple(own)) for n, own in pieces.items())
    return carry_out(ConversionPlan(tuple(outputs)), store)


def is_transposed(link: Link) -> bool:
    """Whether the stored weight is [in, out]."""
    return link.axes.index(len(link.box) - 2) == len(link.axes) - 1


def moved_adapter(
    moves: Sequence[WeightRows], sources: Mapping[str, Factors], shape: tuple[int, ...], shared: Callable[[str], Tensor]
) -> Factors | None:
    """Return the adapter of a target weight, whose shape is [..., out, in], from the adapters of the weights that its
    rows are in; None where it has none. shared: which columns of a source's B have numbers at all."""
    *experts, rows, columns = shape
    used = torch.zeros(tuple(experts), dtype=torch.int64, device="cpu")
    placed: list[tuple[WeightRows, int, Tensor, Tensor]] = []
    scalings = {sources[move.source].scaling for move in moves}
    scaling = scalings.pop() if len(scalings) == 1 else 1.0
    for move in moves:
        source = sources[move.source]
        a, b = source.a[move.source_experts], source.b[(*move.source_experts, move.source_rows)]
        here = _columns(b)
        if bool((shared(move.source) & ~here).any()) and (bool(here.any()) or source.lengths is None):
            a, b = a[..., here, :], b[..., here]
        if not a.shape[-2]:
            continue
        size = tuple(range(n)[s] for n, s in zip(experts, move.target_experts, strict=True))
        a = a.reshape(*(len(s) for s in size), *a.shape[-2:])
        b = b.reshape(*(len(s) for s in size), -1, b.shape[-1]) * (source.scaling / scaling)
        begin = next((at for other, at, its, _ in placed if _same(other, move) and torch.equal(its, a)), None)
        if begin is None:
            begin = int(used[move.target_experts].max())
            used[move.target_experts] = begin + a.shape[-2]
        placed.append((move, begin, a, b))
    if not placed:
        return None
    rank, first = int(used.max()), placed[0][2]
    found_a, found_b = first.new_zeros((*experts, rank, columns)), first.new_zeros((*experts, rows, rank))
    for move, begin, a, b in placed:
        slot = slice(begin, begin + a.shape[-2])
        found_a[(*move.target_experts, slot)] = a
        found_b[(*move.target_experts, move.target_rows, slot)] = b
    return Factors(found_a, found_b, scaling, _lengths(moves, sources, (*experts, rows)))


def _lengths(moves: Iterable[WeightRows], sources: Mapping[str, Factors], shape: tuple[int, ...]) -> Tensor | None:
    found: Tensor | None = None
    for move in moves:
        lengths = sources[move.source].lengths
        if lengths is not None:
            found = lengths.new_full(shape, torch.nan) if found is None else found
            here = (*move.target_experts, move.target_rows)
            found[here] = lengths[(*move.source_experts, move.source_rows)].reshape(found[here].shape)
    return found


def _same(one: WeightRows, other: WeightRows) -> bool:
    return one.target_experts == other.target_experts


def _columns(b: Tensor) -> Tensor:
    """Return which columns of B have numbers, [r] bool."""
    return (b != 0).flatten(0, -2).any(0)


def filled_columns(sources: Mapping[str, Factors]) -> Callable[[str], Tensor]:
    """Return what says which columns of a source's B have numbers, looked at once."""
    found: dict[str, Tensor] = {}

    def of(name: str) -> Tensor:
        if name not in found:
            found[name] = _columns(sources[name].b)
        return found[name]

    return of
