"""The progress line of long work: on standard error, and only where a person is watching."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..extras import require
from ..sizes import format_size

SECONDS_BETWEEN = 0.1


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `report(done_bytes, total_bytes)`; without a terminal it does nothing."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    begin, shown = time.monotonic(), 0.0

    def report(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= SECONDS_BETWEEN or done == total:
            shown = now
            # the cursor goes back to the start of the line, so that whatever is printed next replaces it
            print(f"{title}: {progress_text(done, total, now - begin)}\x1b[K\r", end="", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        print("\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def loading_bars() -> Iterator[None]:
    """Let transformers show how far it is with loading where a person is watching, and only there."""
    logging = require("transformers", "hf", feature="the comparison").utils.logging
    shown = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def progress_text(done: int, total: int, seconds: float) -> str:
    """Say how much is done, how fast, when the rest will be: "1.2 GiB of 4.8 GiB, 25%, 312.0 MiB/s, 0:12 left"."""
    share = done / total if total else 1.0
    rate = done / seconds if seconds > 0 else 0.0
    text = f"{format_size(done)} of {format_size(total)}, {int(100 * share)}%, {format_size(rate)}/s"
    if not rate:
        return text
    left = round((total - done) / rate)
    clock = f"{left // 60}:{left % 60:02d}" if left < 3600 else f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    return f"{text}, {clock} left"
