"""The progress of long work: on standard error, and only where a person is watching."""

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..extras import require
from ..sizes import format_size
from ..terminal import is_terminal, rich_console

SECONDS_BETWEEN = 10.0
"""From one line to the next, where rich is not installed."""


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `report(done_bytes, total_bytes)`; without a terminal it does nothing."""
    console = rich_console(sys.stderr)
    if console is None:
        line = _now_and_then(title)
        yield lambda done, total: line(lambda seconds: progress_text(done, total, seconds))
        return
    rich = importlib.import_module("rich.progress")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TextColumn("{task.fields[rate]}"),  # TransferSpeedColumn counts in powers of 1000
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None, rate="")

        def report(done: int, total: int) -> None:
            speed = progress.tasks[task].speed
            progress.update(task, completed=done, total=total, rate=f"{format_size(speed)}/s" if speed else "")

        yield report


@contextmanager
def part_progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yield `report(done_parts, total_parts, what is done now)`; without a terminal it does nothing."""
    console = rich_console(sys.stderr)
    if console is None:
        line = _now_and_then(title)
        yield lambda done, total, what: line(lambda seconds: f"{done} of {total}: {what}")
        return
    rich = importlib.import_module("rich.progress")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[what]}"),
    )
    with rich.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None, what="")
        yield lambda done, total, what: progress.update(task, completed=done, total=total, what=what)


@contextmanager
def loading_bars() -> Iterator[None]:
    """Let transformers show how far it is with loading where a person is watching, and only there."""
    logging = require("transformers", "hf", feature="the comparison").utils.logging
    shown = logging.is_progress_bar_enabled()
    if not is_terminal(sys.stderr):
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _now_and_then(title: str) -> Callable[[Callable[[float], str]], None]:
    """Return what prints a line now and then, on terminals without rich: what `says` returns of the seconds so far."""
    begun, watched = time.monotonic(), is_terminal(sys.stderr)
    shown = begun

    def show(says: Callable[[float], str]) -> None:
        nonlocal shown
        if watched and (now := time.monotonic()) - shown >= SECONDS_BETWEEN:
            shown = now
            print(f"{title}: {says(now - begun)}", file=sys.stderr, flush=True)

    return show


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
