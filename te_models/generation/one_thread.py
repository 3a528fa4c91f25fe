"""On how many threads the steps of decoding run on CPU: on one, where each of their operations is short."""

import contextlib
import weakref
from contextlib import AbstractContextManager

from te_models.kernels.gemm.gemv import FEW
from te_models.kernels.threads import LEAST_NS, on_one_thread

from ..model import GPTModel

_largest: weakref.WeakKeyDictionary[GPTModel, int] = weakref.WeakKeyDictionary()
"""Elements of the largest parameter on CPU within a layer of a model; 0: there is none."""


def short_steps(model: GPTModel, rows: int) -> AbstractContextManager[None]:
    """Return what a step that reads this many tokens runs in, of all rows together.

    A second thread would mostly be waited for: milliseconds where another process uses its processor.
    Products by large weights, as the output layer's, go through functions that choose their threads themselves.
    """
    return on_one_thread() if one_thread_suffices(model, rows) else contextlib.nullcontext()


def one_thread_suffices(model: GPTModel, rows: int) -> bool:
    """Whether each operation of a step within the layers of a model is short for this many rows."""
    if rows > FEW:
        return False
    if model not in _largest:
        sizes = [p.numel() for p in model.decoder.parameters() if p.device.type == "cpu"]
        _largest[model] = max(sizes, default=0)
    return 0 < 0.2 * _largest[model] < LEAST_NS
