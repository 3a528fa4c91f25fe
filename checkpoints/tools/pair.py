"""Two folders, opened to be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

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


def aligned(a: Iterator[torch.Tensor], b: Iterator[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same parts of two tensors of equal size, each of which comes in flat parts of its own sizes."""
    x = y = None
    while True:
        x = next(a, None) if x is None or x.numel() == 0 else x
        y = next(b, None) if y is None or y.numel() == 0 else y
        if x is None or y is None:
            assert x is y, "both have as many elements"
            return
        n = min(x.numel(), y.numel())
        if n:
            yield x[:n], y[:n]
        x, y = x[n:], y[n:]
