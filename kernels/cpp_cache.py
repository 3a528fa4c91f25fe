"""Where compiled libraries are kept for later processes: a folder that nobody else can write to.

Whoever writes there runs code in every later process, so a folder of another user's, or one that others may write to,
is not used: this process then makes a private one. Beside each library lie its size and SHA-256, compared before it is
loaded: one that is cut would end every process that loads it.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .machine import cache_folder, make_private

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_WAIT = 0.05


class UntrustedError(OSError):
    """Others may write where a library would be loaded from; the message says where, in one sentence."""


def shared_folder() -> Path:
    """Return the folder of the machine's libraries, made where it is absent. Raises OSError (UntrustedError, too) and
    NoCacheFolderError."""
    folder = cache_folder() / "cpp"
    make_private(folder)
    return trusted(folder)


def trusted(folder: Path) -> Path:
    """Return where a folder is, links followed. Raises UntrustedError where another user could put files there."""
    folder = folder.resolve(strict=True)
    info, me = folder.stat(), os.geteuid()
    if info.st_uid != me:
        raise UntrustedError(f"{folder} belongs to another user ({info.st_uid}, and this is {me})")
    if info.st_mode & _OTHERS:
        raise UntrustedError(f"others may write to {folder} (mode {stat.S_IMODE(info.st_mode):o}; allowed: 700)")
    system = {0, me, Path(folder.anchor).stat().st_uid}
    for above in folder.parents:  # who may rename the folder may put another in its place
        info = above.stat()
        if info.st_uid not in system or (info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX):
            raise UntrustedError(f"others may replace {folder}: they may write to {above}")
    return folder


@functools.cache
def private_folder() -> Path:
    """Return a folder of this process's own, removed with it. Raises OSError."""
    folder, process = Path(tempfile.mkdtemp(prefix="te_models-cpp-")), os.getpid()

    @atexit.register
    def remove() -> None:
        if os.getpid() == process:  # a fork that ends is no reason
            shutil.rmtree(folder, ignore_errors=True)

    return trusted(folder)


os.register_at_fork(after_in_child=private_folder.cache_clear)  # it goes when the process that made it does


def intact(library: Path) -> bool:
    """Whether a library is there as this user wrote it."""
    try:
        size, digest = _note(library).read_text().split()
        fd = os.open(library, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return False
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & _OTHERS:
            return False
        return info.st_size == int(size) and hashlib.file_digest(file, "sha256").hexdigest() == digest


def is_damaged(library: Path) -> bool:
    """Whether a library was written, and is another one now."""
    return os.path.lexists(library) and os.path.lexists(_note(library)) and not intact(library)


def publish(written: Path, library: Path) -> None:
    """Give a written library its name, its size and digest beside it: all on the disk before the names are. Raises
    OSError."""
    written.chmod(0o700)
    note = written.with_name("note")
    note.touch(0o600)
    note.write_text(f"{written.stat().st_size} {hashlib.sha256(written.read_bytes()).hexdigest()}\n")
    _flush(written)
    _flush(note)
    written.replace(library)
    note.replace(_note(library))
    _flush(library.parent)


@contextlib.contextmanager
def build_folder(library: Path, alone: bool) -> Iterator[Path]:
    """Yield a folder to make a library in, removed in the end. Raises OSError."""
    prefix = f"{library.stem}."
    if alone:  # what a killed process left
        for left in library.parent.glob(f"{prefix}*.partial"):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=library.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def library_lock(library: Path, seconds: float) -> Iterator[bool]:
    """Be the one process that makes a library, yield True. Where another does so, wait until it has, or is killed, but
    not longer than `seconds`, and where the system has no locks not at all: yield False."""
    import fcntl

    fd, held, place, until = -1, False, int(library.stem[:7], 16), time.monotonic() + seconds
    try:
        with contextlib.suppress(OSError):
            # a lock of the process, unlike flock's: a fork that outlives it does not hold it on
            fd = os.open(library.with_name("lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            while not held and time.monotonic() < until:
                try:
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                    held = True
                except (BlockingIOError, PermissionError):  # another process has it: POSIX allows either
                    time.sleep(_WAIT)
        yield held
    finally:
        if fd >= 0:
            os.close(fd)


def _note(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
