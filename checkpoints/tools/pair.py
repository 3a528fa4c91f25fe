"""Two folders, opened to be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..folder.checkpoint import Checkpoint, open_checkpoint
from .conversion import PathLike


@contextmanager
def open_pair(a: PathLike, b: PathLike) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Open two folders so that what differs in their files differs here.

    Quantized weights that no form of ours takes over are read as values, in the dtype of the other weights, as an
    import would store them. Of two folders that both have such weights they are read in float32: rounded, values of
    different scales can be the same.
    """
    with ExitStack() as stack:
        left, right = (stack.enter_context(open_checkpoint(path, verify=False)) for path in (a, b))
        if all(c.quantized is not None and c.quantized.found.inexact for c in (left, right)):
            left, right = (
                stack.enter_context(open_checkpoint(c.path, float32=True, verify=False)) for c in (left, right)
            )
        yield left, right
