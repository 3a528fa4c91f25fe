"""`--force`: replace an existing model folder only when its successor is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield the path to write to; at the end of the block that path is `out`.

    An `out` that does not exist is written directly. With `force` an existing model folder stays in place until the
    block ends without an error, then the new one takes its name.

    Raises:
        ValueError: `out` exists and `force` is off, or it is not a model folder (which is never deleted).
    """
    if not os.path.lexists(out):
        yield out
        return
    if not force:
        raise ValueError(f"{out} exists; --force replaces it")
    if out.is_symlink() or not (out / "config.json").is_file():
        raise ValueError(f"{out} is not a model folder, so --force does not replace it")
    fresh = out.with_name(f".{out.name}.new-{os.getpid()}")
    stale = out.with_name(f".{out.name}.old-{os.getpid()}")
    try:
        yield fresh
        if fresh.exists():  # a dry run writes nothing
            out.rename(stale)
            fresh.rename(out)
    finally:
        if not out.exists() and stale.exists():
            stale.rename(out)
        for leftover in (fresh, stale):
            shutil.rmtree(leftover, ignore_errors=True)
