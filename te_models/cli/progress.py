"""The progress bar of long work: on standard error, and only where a person is watching."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..extras import installed, require


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `report(done_bytes, total_bytes)`. Without a terminal, or without tqdm (extra `train`), it does nothing."""
    if not sys.stderr.isatty() or not installed("train"):
        yield lambda done, total: None
        return
    bar: Any = require("tqdm", "train").tqdm(desc=title, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr)

    def report(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        yield report
