"""Folders and files that appear under their final name complete, or not at all.

A new folder is written beside its destination under a temporary name, flushed to the disk with everything in it, and
renamed. An existing one is replaced only when that is asked for, by exchanging the two names in one system call where
the kernel has it (`renameat2(RENAME_EXCHANGE)`, Linux), so that at every moment the name leads to one complete folder,
old or new. A killed run leaves only its temporary folder; the next run to the same destination removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from .errors import CheckpointError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def new_folder(destination: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder; rename it to `destination` when the block ends, remove it when the block fails."""
    check_destination(destination, overwrite=overwrite)
    made = _make_parents(destination.parent)
    try:
        _remove_abandoned(destination)
        temporary = destination.parent / f".{destination.name}.{secrets.token_hex(4)}.partial"
        temporary.mkdir()
    except OSError as error:
        _remove_empty(made)
        raise CheckpointError(f"cannot write in {destination.parent}: {error.strerror}") from None
    lock = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tells other runs that the folder is in use; released when the process dies
        yield temporary
        _flush_tree(temporary)
        _publish(temporary, destination, overwrite=overwrite)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _remove_empty(made)
        if isinstance(error, OSError):
            raise CheckpointError(f"writing {destination} failed: {error.strerror or error}") from error
        raise
    finally:
        os.close(lock)


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError where `destination` may not be written."""
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise CheckpointError(f"{destination} exists and is not a folder")
    if destination.exists() and not overwrite:
        if not any(destination.iterdir()):
            return
        raise CheckpointError(f"{destination} exists; choose another destination or pass overwrite")


def check_space(destination: Path, nbytes: int) -> None:
    """Raise CheckpointError if the disk of `destination` cannot hold `nbytes` more."""
    existing = next(p for p in (destination, *destination.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise CheckpointError(f"{destination} needs {nbytes / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free")


def replace_text(destination: Path, text: str) -> None:
    """Give a file new contents in one step: whoever opens it, even after a power cut, reads the old text or the new."""
    temporary = destination.with_name(f".{destination.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    temporary.rename(destination)
    flush(destination.parent)


def flush(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _flush_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush(Path(root, name))
        flush(Path(root))


def _publish(temporary: Path, destination: Path, *, overwrite: bool) -> None:
    if destination.exists() and any(destination.iterdir()):
        if not overwrite:  # it appeared while we wrote
            raise CheckpointError(f"{destination} exists; choose another destination or pass overwrite")
        if not _exchange(temporary, destination):
            old = temporary.with_suffix(".old")
            destination.rename(old)
            temporary.rename(destination)
            temporary = old
        flush(destination.parent)
        shutil.rmtree(temporary)
    else:
        temporary.rename(destination)
    flush(destination.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def _remove_abandoned(destination: Path) -> None:
    for path in destination.parent.glob(f".{glob.escape(destination.name)}.????????.partial"):
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # another run is writing it now
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _make_parents(folder: Path) -> list[Path]:
    made = []
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            try:
                path.mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                _remove_empty(made)
                raise CheckpointError(f"cannot create {path}: {error.strerror}") from None
            made.append(path)
    return made


def _remove_empty(folders: list[Path]) -> None:
    for path in reversed(folders):
        with contextlib.suppress(OSError):
            path.rmdir()
