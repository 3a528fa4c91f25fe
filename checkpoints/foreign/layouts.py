"""Ways to store a tensor that training systems have and Hugging Face folders have not, as in `mapping.layout_ops`."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..io.boxes import Range, Shape, full
from ..mapping.layout_ops import Axes, Layout, Placed


@dataclass(frozen=True)
class InterleavedHeads:
    """Rows of heads whose channels are rotated in pairs (2 i, 2 i + 1), of a model that rotates (i, i + D/2)."""

    name: str
    heads: int

    def place(self, shape: Shape) -> Iterator[Placed]:
        size = shape[0] // self.heads
        whole, axes = full(shape), tuple(range(len(shape)))
        for head in range(self.heads):
            for part in (0, 1):
                begin = head * size + part * (size // 2)
                rows = Range(begin, begin + size // 2)
                stored = Range(head * size + part, head * size + part + size, 2)
                yield Placed((rows, *whole[1:]), self.name, (stored, *whole[1:]), shape, axes)


@dataclass(frozen=True)
class Member:
    """Number `number` of `count` tensors that are stored as one, with a dimension for them in front."""

    inner: Layout
    number: int
    count: int

    def place(self, shape: Shape) -> Iterator[Placed]:
        for p in self.inner.place(shape):
            at = Range(self.number, self.number + 1)
            axes: Axes = (None, *p.axes)
            yield Placed(p.box, p.stored, (at, *p.stored_box), (self.count, *p.stored_shape), axes)
