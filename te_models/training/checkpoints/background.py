"""Checkpoints that are written while the run goes on: a copy in main memory, and a thread that writes it.

One is written at a time. What a checkpoint is does not change: it appears under its name by one rename, when every byte
is on the disk, so a process that is killed in the middle leaves the one before.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from te_models.layers import QuantizedTensor

from ...parallel.parts import LocalPart

PATIENCE = 60.0
"""Seconds that a run which fails waits for its thread: the other ranks may never do their part of the work."""

T = TypeVar("T", Tensor, LocalPart)


@torch.no_grad()
def host_copies(values: Mapping[str, T]) -> dict[str, T]:
    """Return copies in main memory, which no later step changes. One tensor under several names is one copy."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            plain = tensor.detach()
            copies[id(tensor)] = (
                plain.clone().cpu() if isinstance(plain, QuantizedTensor) else plain.to("cpu", copy=True)
            )
        return copies[id(tensor)]

    return {
        name: replace(value, tensor=copy(value.tensor)) if isinstance(value, LocalPart) else copy(value)
        for name, value in values.items()
    }


class BackgroundWriter:
    """Runs one piece of work at a time in a separate thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Wait for the work before, raising its error, and begin with this one."""
        self.finish()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised where the run looks next
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of work that has failed; wait for nothing."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self, timeout: float | None = None) -> None:
        """Wait until there is no work, at most `timeout` seconds, and raise its error."""
        if self._thread is not None:
            self._thread.join(timeout)
            self._thread = None
        self.check()
