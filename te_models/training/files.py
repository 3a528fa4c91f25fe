"""Directories that appear complete or not at all.

A directory is written under a temporary name beside its target, every file in it is flushed to the disk, and only
then it is renamed: a process killed at any moment leaves either the old state or the new one, plus at most a leftover
whose name starts with `.tmp-`, which the next write of the same target removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty temporary directory; rename it to `target` on success, remove it on an exception.

    Raises FileExistsError if `target` exists already.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(TEMPORARY_PREFIX + target.name)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        yield temporary
        for root, _, names in os.walk(temporary):
            for name in names:
                fsync(Path(root) / name)
            fsync(Path(root))
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync(target.parent)


def atomic_write_text(target: Path, text: str) -> None:
    """Replace the contents of a file in one step."""
    temporary = target.with_name(TEMPORARY_PREFIX + target.name)
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.rename(target)
    fsync(target.parent)


def fsync(path: Path) -> None:
    """Flush a file or a directory entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
