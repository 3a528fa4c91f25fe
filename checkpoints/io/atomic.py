"""Folders and files that appear under their final name complete, or not at all.

A new folder is put together in a working folder beside its destination, flushed to the disk with everything in it, and
renamed. An existing one is replaced only when that is asked for, by exchanging the two names in one system call where
the kernel has it (`renameat2(RENAME_EXCHANGE)`, Linux), so that at every moment the name leads to one complete folder,
old or new. A run that is killed, or interrupted with Ctrl-C, leaves its working folder, `.NAME.partial`; the next run
to the same destination goes on from it if it is the same job, and otherwise removes it. The working folder is locked
while a run uses it (`te_models.file_lock`), so two runs to one destination cannot disturb each other: the second is
refused.
"""

import contextlib
import ctypes
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from te_models.file_lock import HeldError, locked
from te_models.sizes import plural

from .destination import check_destination, named, working_folder
from .errors import CheckpointError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

_CONTENT, _JOB, _OLD = "content", "job", "old"
"""What a working folder holds: the result, what it is a result of, and the folder that it replaces."""

_MAX_NOTE = 4096

FINISHED = "finished"
"""Where in a working folder there is a note of every file of the result that is complete."""

LOCK = "lock"
"""The file in a working folder that is locked while a run uses the folder."""


@contextlib.contextmanager
def new_folder(
    destination: Path, *, overwrite: bool, job: str | None = None, flushed: str | None = None
) -> Iterator[Path]:
    """Yield an empty folder; rename it to `destination` when the block ends, remove it when the block fails.

    An interruption by the user does not remove what a later run can use: finished files. job: says what is being made.
    Where a killed run of the same job left its folder, that one is yielded, as it was left; whatever else the block
    keeps beside it (in `folder.parent`) is there too. flushed: a folder inside whose files their writers have flushed,
    other processes perhaps.
    """
    check_destination(destination, overwrite=overwrite)
    destination = named(destination)
    with contextlib.ExitStack() as opened:
        created = make_folders(destination.parent)
        opened.callback(remove_empty, created)
        working = opened.enter_context(locked_folder(working_folder(destination), destination))
        try:
            _restore(working, destination)
            check_destination(destination, overwrite=overwrite)
            content = _prepare(working, job)
            yield content
            _flush_tree(content, flushed)
            (working / _JOB).unlink(missing_ok=True)  # what lies there after the exchange of names is not this job's
            _publish(content, destination, overwrite=overwrite)
            remove_locked(working)
            flush(destination.parent)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and (count := _finished(working)):
                raise KeyboardInterrupt(
                    f"{working} has {plural(count, 'finished file')}: the same command goes on from there"
                ) from None
            with contextlib.suppress(OSError):
                remove_locked(working)
            if isinstance(error, OSError):
                raise CheckpointError(f"writing {destination} failed: {error.strerror or error}") from error
            raise


@contextlib.contextmanager
def locked_folder(folder: Path, destination: Path) -> Iterator[Path]:
    """Make a working folder of `destination` where it is not there, and lock it while the block runs.

    Raises CheckpointError where another process holds it, naming that one, or it belongs to another user."""
    with contextlib.ExitStack() as opened:
        while True:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                if folder.lstat().st_uid != os.geteuid():
                    raise CheckpointError(f"{folder} belongs to another user; choose another destination")
                if folder.is_symlink():
                    raise CheckpointError(f"{folder} is a symbolic link, not a folder; remove it")
                opened.enter_context(locked(folder / LOCK))
                break
            except FileNotFoundError:
                if destination.parent.is_dir():
                    continue  # another run finished and removed it between the two calls
                raise CheckpointError(f"cannot write in {destination.parent}: it was removed") from None
            except HeldError as error:
                raise CheckpointError(f"{error.holder} is writing {destination}; wait for it{error.advice}") from None
            except OSError as error:
                raise CheckpointError(f"cannot write in {destination.parent}: {error.strerror}") from None
        yield folder


def remove_locked(folder: Path) -> None:
    """Remove a folder that `locked_folder` holds. The file of the lock goes last, because whoever makes a new one goes
    on to use the folder."""
    _empty(folder)
    (folder / LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another run has its lock in it already
        folder.rmdir()


def replace_text(destination: Path, text: str) -> None:
    """Give a file new contents in one step: whoever opens it, even after a power cut, reads the old text or the new."""
    with replaced_file(destination) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replaced_file(destination: Path) -> Iterator[Path]:
    """Yield a path to write a file at. The file gets its name when the block ends, and is removed when the block fails.

    Two processes that write the same file do not meet: each writes to a different path, and the last one stays."""
    temporary = destination.with_name(f".{destination.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        yield temporary
        flush(temporary)
        temporary.rename(destination)
        flush(destination.parent)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _restore(working: Path, destination: Path) -> None:
    """Put back the folder that a run wanted to replace when it was killed, where names cannot be exchanged."""
    if (working / _OLD).is_dir() and not destination.exists():
        (working / _OLD).rename(destination)


def _prepare(working: Path, job: str | None) -> Path:
    """Empty the working folder unless it is of the same job; return the folder in it that becomes the result."""
    content, note = working / _CONTENT, working / _JOB
    same = job is not None and content.is_dir() and not content.is_symlink() and _read(note) == job
    if not same:
        _empty(working)
        content.mkdir()
        if job is not None:
            note.write_text(job)
    return content


def _empty(working: Path) -> None:
    for path in working.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _finished(working: Path) -> int:
    """Return how many files of a job are complete in its working folder."""
    return len(list((working / FINISHED).glob("*.json"))) if (working / _JOB).exists() else 0


def _read(path: Path) -> str | None:
    """Return a short text; None for anything but a regular file: a pipe would be waited for without end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, _MAX_NOTE).decode() if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def _flush_tree(folder: Path, flushed: str | None) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in names if flushed is None or Path(root) != folder / flushed else ():
            flush(Path(root, name))
        flush(Path(root))


def _publish(content: Path, destination: Path, *, overwrite: bool) -> None:
    """Give the folder its final name; what had that name before is then in the working folder."""
    if destination.exists() and any(destination.iterdir()):
        if not overwrite:  # it appeared while we wrote
            raise CheckpointError(f"{destination} exists; choose another destination or pass overwrite")
        if not _exchange(content, destination):
            destination.rename(content.with_name(_OLD))
            try:
                content.rename(destination)
            except OSError:
                content.with_name(_OLD).rename(destination)
                raise
    else:
        content.rename(destination)
    flush(destination.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def make_folders(folder: Path) -> list[Path]:
    """Make a folder and those around it; return the new ones. Raises CheckpointError where one cannot be made."""
    created = []
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            try:
                path.mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                remove_empty(created)
                raise CheckpointError(f"cannot create {path}: {error.strerror}") from None
            created.append(path)
    return created


def remove_empty(folders: list[Path]) -> None:
    """Remove the folders that `make_folders` made, where nothing is in them."""
    for path in reversed(folders):
        with contextlib.suppress(OSError):
            path.rmdir()
