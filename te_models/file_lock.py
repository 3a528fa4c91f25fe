"""A lock on a folder that one process at a time works in; the kernel drops it when the process ends, however it ends.

The lock is `flock` on a small file in the folder, so that a run which was killed can be started again at once. Network
file systems have it too (NFS for files that are opened for writing, so the folder itself is not locked). The file says
which process on which host holds the lock and since when, for the message to whoever comes second. Where a file system
has no locks at all, that note alone decides.

A leaf module: it imports nothing of the project.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_MOST = 4096
_held: set[int] = set()


class HeldError(ValueError):
    """Another process holds the lock.

    Attributes:
        holder: Who it is, for a sentence: "process 12 on host h (since 2026-01-31 12:00:00 UTC)".
        advice: What follows "wait for it" in a sentence: what to remove where only the note says that it is held.
    """

    def __init__(self, holder: str, advice: str = "") -> None:
        super().__init__(f"{holder} holds the lock{advice}")
        self.holder, self.advice = holder, advice


@contextlib.contextmanager
def locked(path: Path) -> Iterator[str | None]:
    """Hold the lock on the file `path`; the file is made, and removed at the end; its folder exists.

    Yields who held it before and was killed, if that was on another host: where locks do not reach other hosts, that
    process may still run. Forked children do not keep the lock.

    Raises:
        HeldError: Another process, or another thread of this one, holds it.
        OSError: The file cannot be made, or is not a plain one.
    """
    fd, before = _acquire(path)
    owner = os.getpid()
    _held.add(fd)
    try:
        yield before
    finally:
        if os.getpid() == owner:  # a child's copy of the descriptor was closed when it was forked
            _held.discard(fd)
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(fd), path.lstat()):
                    path.unlink()
            os.close(fd)


def _acquire(path: Path) -> tuple[int, str | None]:
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, 0o666)
        try:
            has_locks = _flock(fd)
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:  # writing the note would change another file
                raise OSError(errno.EINVAL, "it is not a plain file", str(path))
            if info.st_nlink and os.path.samestat(info, path.lstat()):
                before = _read_note(fd)
                if not has_locks and before is not None and _may_run(*before):
                    raise HeldError(_named(before), f", or remove {path} if that process has ended")
                _write_note(fd)
                return fd, None if before is None or before[1] == platform.node() else _named(before)
        except BlockingIOError:
            holder = _named(_read_note(fd))
            os.close(fd)
            raise HeldError(holder) from None
        except FileNotFoundError:
            pass  # the process before removed it between the two calls
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _flock(fd: int) -> bool:
    """Lock a file; False where the file system has no locks. Raises BlockingIOError where another holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno == errno.EACCES:  # how a lock of another host is told on some network file systems
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


Note = tuple[int, str, str]
"""Number of the process, name of its host, when it took the lock."""


def _write_note(fd: int) -> None:
    """Say whose lock it is. A full disk does not matter: the lock is held, only its holder stays unknown."""
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    note = json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since}) + "\n"
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, note.encode(), 0)


def _read_note(fd: int) -> Note | None:
    """Return what the note says; None without a note, or for a file of another kind."""
    try:
        values = json.loads(os.pread(fd, _MOST, 0))
        pid, host, since = values["pid"], values["host"], values["since"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(pid) is not int or not 0 < pid < 1 << 31 or not all(_is_plain(text) for text in (host, since)):
        return None
    return pid, host, since


def _is_plain(text: object) -> bool:
    return isinstance(text, str) and text.isprintable() and len(text) <= 256


def _named(note: Note | None) -> str:
    return "another process" if note is None else f"process {note[0]} on host {note[1]} (since {note[2]})"


def _may_run(pid: int, host: str, since: str) -> bool:
    """Whether a process may still run, as far as this host can know."""
    if host != platform.node():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


def _leave_to_parent() -> None:
    """In a forked child: close what it got of its parent's locks: in the child they would outlive a killed parent."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_leave_to_parent)
