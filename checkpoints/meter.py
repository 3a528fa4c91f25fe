"""How much of the work is done, counted over all threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .errors import CheckpointError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) as data is written, by one thread at a time, though not always the same."""


class Meter:
    """Counts the bytes of all files, tells the caller's `progress`, and stops every thread when one has failed."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.stop = threading.Event()
        self._total, self._done, self._progress = total, 0, progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes that were written, or found written."""
        if self.stop.is_set():
            raise CheckpointError("another file could not be written")
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total)
