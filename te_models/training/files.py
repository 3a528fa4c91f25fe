"""Files and directories that appear complete or not at all, and that survive a power cut once they have appeared.

A process killed at any moment leaves either the old state or the new one. For directories this is
`te_models.checkpoints`' way of writing (a temporary name, then one rename), with every file flushed to the disk first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from te_models.checkpoints.atomic import new_folder


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty temporary directory; rename it to `target` on success, remove it on an exception.

    Raises CheckpointError if `target` exists already.
    """
    with new_folder(target, overwrite=False) as temporary:
        yield temporary
        for root, _, names in os.walk(temporary):
            for name in names:
                fsync(Path(root) / name)
            fsync(Path(root))


def atomic_write_text(target: Path, text: str) -> None:
    """Replace the contents of a file in one step."""
    temporary = target.with_name(f".{target.name}.partial")
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
