"""SIGTERM and Ctrl-C: a run saves what it has before it ends.

Until the first step begins, and after the last one, a signal ends the process at once: there is nothing to save. In
between it is only noted, and the loop ends after the step that runs. A second Ctrl-C ends it without saving.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_AGAIN = 1.0
"""Seconds from which on a second Ctrl-C is meant: launchers repeat a signal within less."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the work; the message says what is saved. exit_code: 128 + the signal's number, as shells do."""

    def __init__(self, signum: int, message: str = "") -> None:
        super().__init__(message)
        self.signum = signum

    @property
    def what(self) -> str:
        """What happened, in one word."""
        return SIGNALS[signal.Signals(self.signum)]

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


class StopSignals:
    """The handlers of SIGTERM and Ctrl-C while a `with` block runs; none outside the main thread: only that can have
    them. Signals that the process ignores, as under nohup, stay ignored."""

    def __init__(self) -> None:
        self.received = 0
        self._deferred = False
        self._first = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                handler = signal.getsignal(signum)
                outer = getattr(handler, "__self__", None)
                if isinstance(outer, StopSignals):
                    self.received = self.received or outer.received
                if handler not in (signal.SIG_IGN, None):  # None: one that Python could not put back
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note signals while the block runs. Raises Interrupted where one came before, and was swallowed: an
        exception that a signal raises during an import does not always reach its end."""
        self.check()
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def check(self) -> None:
        """Raise Interrupted if a signal was received."""
        if self.received:
            raise Interrupted(self.received)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now, again = time.monotonic(), self.received != 0
        self.received = self.received or signum
        if not again:
            self._first = now
        if not self._deferred or (again and signum == signal.SIGINT and now - self._first > _AGAIN):
            raise Interrupted(signum)
