"""One amax for all tensors of files that become one matrix, in formats with one number per matrix.

Files hold q, k and v, or gate and up, as tensors of their own, and our linear layers hold them as one matrix with one
number (FP8's scale, NVFP4's amax). Quantized with the amax of all of them, what is written can be taken over again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Executor

from te_models.layers.quantizer import Quantizer

from ..io.boxes import Shape
from ..plan.tensor_map import Link
from .row_blocks import Amaxes, Read, Rows, amaxes_of, bands

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
