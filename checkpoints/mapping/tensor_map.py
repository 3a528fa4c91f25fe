"""Links: how parts of stored tensors correspond to parts of the model's canonical tensors.

Canonical tensors are the model's parameters in grouped layout (`param_shapes.py`). A `Namespace` describes one way to
store them (a family's files, our grouped files, our per-GEMM files) as a set of links

    canonical[name][box]  <->  stored[stored_name][stored_box], stored dimension d being canonical dimension axes[d]

A link has no direction, so one description serves import and export, and two namespaces over the same canonical tensors
compose: intersecting their links in canonical coordinates gives the pieces of any conversion between them (Hugging Face
to ours, ours to Hugging Face, grouped to per-GEMM, either to a live model). That is what makes a plan invertible by
construction and total by a check: the links of each namespace must tile both its own and the canonical tensors.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..io.boxes import Box, Range, Shape, full, intersect, tiles
from ..io.dtypes import FLOATS
from ..io.errors import CheckpointError, shorten


@dataclass(frozen=True, slots=True)
class Link:
    """One correspondence. `axes[d]` is the canonical dimension of stored dimension d, None for an extra one of size 1.

    A canonical dimension that `axes` does not name has size 1 in `box` (one expert of a stack, for example).
    """

    name: str
    box: Box
    stored: str
    stored_box: Box
    axes: tuple[int | None, ...]

    def stored_part(self, part: Box) -> Box:
        """Map a part of `box` to the stored tensor."""
        if part is self.box:
            return self.stored_box
        if self.box is self.stored_box and None not in self.axes and self.axes == tuple(range(len(part))):
            return part
        ranges = []
        for d, axis in enumerate(self.axes):
            if axis is None:
                ranges.append(self.stored_box[d])
            else:
                offset = self.box[axis].start
                ranges.append(self.stored_box[d].part(part[axis].start - offset, part[axis].stop - offset))
        return tuple(ranges)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a stored tensor must be: its shape, the dtypes it may have, and whether dtype conversion applies to it."""

    shape: Shape
    dtypes: frozenset[str] = FLOATS
    convertible: bool = True


TABLE = functools.partial(TensorSpec, dtypes=frozenset({"I64", "I32"}), convertible=False)
"""What a stored table of whole numbers must be."""


@dataclass(frozen=True)
class Namespace:
    """A way to store a model: its tensors and their links to the canonical ones.

    `copies` says how many canonical places read one stored tensor (1 unless a conversion replicates it on purpose).
    """

    canonical: Mapping[str, Shape]
    stored: Mapping[str, TensorSpec]
    links: tuple[Link, ...]
    copies: Mapping[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Raise CheckpointError unless every canonical and every stored element is linked exactly once."""
        by_name: dict[str, list[Box]] = defaultdict(list)
        by_stored: dict[str, list[Box]] = defaultdict(list)
        for link in self.links:
            by_name[link.name].append(link.box)
            by_stored[link.stored].append(link.stored_box)
        bad = [n for n, shape in self.canonical.items() if n not in by_name or not tiles(by_name.pop(n), shape)]
        bad += [
            n
            for n, stored in self.stored.items()
            if n not in by_stored or not tiles(by_stored.pop(n), stored.shape, self.copies.get(n, 1))
        ]
        bad += [*by_name, *by_stored]
        if bad:
            raise CheckpointError(f"the weight map does not cover these tensors exactly once: {shorten(bad)}")


@dataclass(frozen=True, slots=True)
class Piece:
    """Move `source[source_box]` to `box` of the output; `axes[d]` is the source dimension of output dimension d."""

    source: str
    source_box: Box
    box: Box
    axes: tuple[int | None, ...]

    @property
    def permutes(self) -> bool:
        """Whether the elements change order (a transpose), size-1 dimensions aside."""
        used = [a for a, r in zip(self.axes, self.box) if a is not None and r.size > 1]
        return used != sorted(used)


def compose(source: Namespace, target: Namespace) -> dict[str, list[Piece]]:
    """Return, for every stored tensor of `target`, the pieces of `source`'s stored tensors that fill it."""
    if dict(source.canonical) != dict(target.canonical):
        differing = [
            n for n in {**source.canonical, **target.canonical} if source.canonical.get(n) != target.canonical.get(n)
        ]
        raise CheckpointError(f"the two checkpoints are not of the same model; they differ in {shorten(differing)}")
    sources: dict[str, list[Link]] = defaultdict(list)
    for link in source.links:
        sources[link.name].append(link)
    for links in sources.values():
        links.sort(key=_first_row)
    pieces: dict[str, list[Piece]] = {name: [] for name in target.stored}
    by_name: dict[str, list[Link]] = defaultdict(list)
    for link in target.links:
        by_name[link.name].append(link)
    for name, links in by_name.items():
        for from_link, to_link in _meeting(sources[name], sorted(links, key=_first_row)):
            part = intersect(from_link.box, to_link.box)
            if part is not None:
                pieces[to_link.stored].append(_piece(from_link, to_link, part))
    return pieces


def _first_row(link: Link) -> int:
    return link.box[0].start if link.box else 0


def _meeting(a: list[Link], b: list[Link]) -> Iterable[tuple[Link, Link]]:
    """Pairs whose boxes meet along dimension 0, in one sweep: both lists are sorted by their first row."""
    begin = 0
    for to_link in b:
        if not to_link.box:
            yield from ((from_link, to_link) for from_link in a)
            continue
        low, high = to_link.box[0].start, to_link.box[0].stop
        while begin < len(a) and a[begin].box[0].stop <= low:
            begin += 1
        for from_link in a[begin:]:
            if from_link.box[0].start >= high:
                break
            yield from_link, to_link


def _piece(source: Link, target: Link, part: Box) -> Piece:
    axes = _axes(source.axes, target.axes)
    return Piece(source.stored, source.stored_part(part), target.stored_part(part), axes)


@functools.lru_cache
def _axes(source: tuple[int | None, ...], target: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return the source dimension of each dimension of the target."""
    where = {axis: d for d, axis in enumerate(source) if axis is not None}
    return tuple(where.get(axis) if axis is not None else None for axis in target)


def identity_namespace(canonical: Mapping[str, Shape], stored: Mapping[str, TensorSpec] | None = None) -> Namespace:
    """Return the namespace that stores every canonical tensor under its own name."""
    links = tuple(Link(n, full(shape), n, full(shape), tuple(range(len(shape)))) for n, shape in canonical.items())
    return Namespace(canonical, stored or {n: TensorSpec(shape) for n, shape in canonical.items()}, links)


def split_stacks(namespace: Namespace, stacks: Mapping[str, int]) -> Namespace:
    """Return a namespace like `namespace` whose named stored stacks `p [G, ...]` are G tensors `p0 ... p{G-1}` instead.

    For each stack the suffix rule puts the number before `stacks[name]` trailing characters, so that quantized fields
    `weight_scale_inv` become `weight0_scale_inv`.
    """
    stored: dict[str, TensorSpec] = {}
    for name, spec in namespace.stored.items():
        if name not in stacks:
            stored[name] = spec
            continue
        for g in range(spec.shape[0]):
            stored[member_name(name, stacks[name], g)] = TensorSpec(spec.shape[1:], spec.dtypes, spec.convertible)
    links: list[Link] = []
    for link in namespace.links:
        if link.stored not in stacks:
            links.append(link)
            continue
        axis = link.axes[0]
        members = link.stored_box[0]
        for number in range(members.size):
            box = link.box
            if axis is not None:
                begin = box[axis].start + number
                box = (*box[:axis], Range(begin, begin + 1), *box[axis + 1 :])
            name = member_name(link.stored, stacks[link.stored], members.start + number * members.step)
            links.append(Link(link.name, box, name, link.stored_box[1:], link.axes[1:]))
    return Namespace(namespace.canonical, stored, tuple(links))


def member_name(stack: str, suffix_length: int, number: int) -> str:
    """Return the name of member `number` of a stack, e.g. `weight_scale_inv` -> `weight3_scale_inv`."""
    stem = len(stack) - suffix_length
    return f"{stack[:stem]}{number}{stack[stem:]}"
