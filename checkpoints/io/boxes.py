"""Boxes: axis-aligned, possibly strided blocks of a tensor's index space.

A box has one (start, stop, step) per dimension and no size-zero ambiguity: `stop - start` is a multiple of `step`.
Boxes are how a conversion talks about parts of tensors without reading them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Range(NamedTuple):
    """Indices start, start + step, ... below stop."""

    start: int
    stop: int
    step: int = 1

    @property
    def size(self) -> int:
        return (self.stop - self.start) // self.step

    def part(self, begin: int, end: int) -> Range:
        """Return elements number begin .. end - 1 of this range."""
        return Range(self.start + begin * self.step, self.start + end * self.step, self.step)


Box = tuple[Range, ...]


def full(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return _full(tuple(shape))


@functools.lru_cache(4096)
def _full(shape: Shape) -> Box:
    return tuple(Range(0, n) for n in shape)  # a mixture has few shapes, and each of them thousands of times


def extents(box: Box) -> Shape:
    """Return the number of indices of the box in each dimension."""
    return tuple(r.size for r in box)


def element_count(box: Box) -> int:
    """Return the number of elements of the box."""
    elements = 1
    for start, stop, step in box:
        elements *= (stop - start) // step
    return elements


def slices(box: Box) -> tuple[slice, ...]:
    """Return the box as an index for a torch tensor."""
    return tuple(slice(r.start, r.stop, r.step) for r in box)


def shift(box: Box, dim: int, offset: int) -> Box:
    """Return the box moved by `offset` along `dim`."""
    r = box[dim]
    return (*box[:dim], Range(r.start + offset, r.stop + offset, r.step), *box[dim + 1 :])


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes with step 1, or None where they do not meet."""
    if all(y.start <= x.start and x.stop <= y.stop for x, y in zip(a, b)) and all(r.stop > r.start for r in a):
        return a
    common = tuple(Range(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b))
    return common if all(r.stop > r.start for r in common) else None


def flat_interval(box: Box, shape: Shape) -> tuple[int, int] | None:
    """Return the row-major element interval [begin, end) that the box fills, or None where it is not contiguous."""
    inner = len(shape)
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1], 1):
        inner -= 1
    begin, elements = 0, 1
    for d, ((start, stop, step), n) in enumerate(zip(box, shape)):
        size = (stop - start) // step
        if d < inner and size != 1 and (d < inner - 1 or step != 1):
            return None
        begin, elements = begin * n + start, elements * size
    return begin, begin + elements


def tiles(boxes: Iterable[Box], shape: Shape, copies: int = 1) -> bool:
    """Whether the boxes cover every element of a tensor of this shape exactly `copies` times.

    Contiguous boxes (all that the families of this version need, but for interleaved ones) are sorted; of others with
    step 1 the corners are counted, and strided ones are compared in pairs.
    """
    boxes = list(boxes)
    if len(boxes) == copies == 1 and boxes[0] == full(shape):
        return True
    if sum(map(element_count, boxes)) != copies * math.prod(shape):
        return False
    if any(r.start < 0 or r.stop > n + r.step - 1 for box in boxes for r, n in zip(box, shape, strict=True)):
        return False
    intervals = [interval for box in boxes if (interval := flat_interval(box, shape)) is not None]
    if len(intervals) == len(boxes):
        position = 0
        times = Counter(intervals)
        for begin, end in sorted(times):
            if begin != position:
                return False
            position = end
        return position == math.prod(shape) and set(times.values()) <= {copies}
    if all(r.step == 1 for box in boxes for r in box):
        found = _corners(boxes)
        return found == {corner: copies * sign for corner, sign in _corners([full(shape)]).items()}
    return copies == 1 and not any(_meet(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def _corners(boxes: Iterable[Box]) -> dict[tuple[int, ...], int]:
    """Return the corners of boxes with their signs, plus for an even number of ends among starts, added up where they
    meet. It is the mixed difference of how often each element is covered, and determines that."""
    found: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        for ends in itertools.product((0, 1), repeat=len(box)):
            found[tuple(r[end] for r, end in zip(box, ends))] += -1 if sum(ends) % 2 else 1
    return {corner: sign for corner, sign in found.items() if sign}


def _meet(a: Box, b: Box) -> bool:
    return all(_ranges_meet(x, y) for x, y in zip(a, b))


def _ranges_meet(x: Range, y: Range) -> bool:
    low, high = max(x.start, y.start), min(x.stop, y.stop)
    if low >= high:
        return False
    if x.step == 1 or y.step == 1:
        strided = x if x.step != 1 else y
        first = strided.start + -(-(low - strided.start) // strided.step) * strided.step
        return first < high
    return bool(set(range(*x)) & set(range(*y)))
