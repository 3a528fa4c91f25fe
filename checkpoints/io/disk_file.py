"""A file written once, from its begin to its end, past the system's cache of file pages where it can be.

What a conversion writes may be more than fits in memory. Through the cache every byte is copied once more and needs a
new page (0.5 s of processor time per GB; 0.07 past it), and pages that others read make room for it. Writing past it
(`O_DIRECT`) needs memory and offsets at multiples of a block, so data is collected in aligned buffers, and threads
write these. Where the file system does not offer it, the same buffers go through the cache.
"""

import ctypes
import errno
import fcntl
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from .buffers import Buffer, Ring

_BLOCK = 4096
"""Bytes; what file systems and disks align to, or to a divisor of it."""

_WRITE_BYTES = 32 << 10
"""Bytes per call through the cache. Larger ones make Linux (6.18, ext4) look for large contiguous pages, and that took
up to eight times the processor time of the whole copy (0.5 s/GiB at 32 KiB; 1 to 3.9 s from 64 KiB to 4 MiB)."""

_FLUSH_BYTES = 128 << 20
"""Bytes through the cache after which a thread starts flushing, so that the disk works while data is still moving."""


class DiskFile:
    """A new file of known size; `finish` leaves it complete and flushed, `close` alone in any state."""

    def __init__(self, path: Path, nbytes: int, staging: Ring, disk: ThreadPoolExecutor) -> None:
        """staging: used by this file alone while it is open. disk: threads that wait for the disk.

        OSError if the file exists, or the disk has no room for nbytes.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._staging, self._disk, self._nbytes = staging, disk, nbytes
        self._fd, self._direct = os.open(path, flags, 0o666), False
        self._chunk: Buffer | None = None  # being filled, from its begin to `_used`, with what goes to `_offset`
        self._used, self._offset, self._flushed = 0, 0, 0
        self._flush: Future[None] = disk.submit(lambda: None)
        try:
            _reserve(self._fd, nbytes)
        except OSError:
            os.ftruncate(self._fd, 0)  # what there was of room is the file's by now
            os.close(self._fd)
            raise
        self._set_direct(True)

    def append(self, address: int, nbytes: int) -> None:
        """Take bytes from memory; the memory is free again when this returns."""
        while nbytes:
            if self._chunk is None:
                self._chunk, self._used = self._staging.next(), 0  # raises what writing its earlier contents raised
            n = min(nbytes, self._staging.nbytes - self._used)
            ctypes.memmove(self._chunk.address + self._used, address, n)
            self._used, address, nbytes = self._used + n, address + n, nbytes - n
            if self._used == self._staging.nbytes:
                self._submit()

    def finish(self) -> None:
        """Write what is left and flush the file."""
        if self._chunk is not None:
            if padding := -self._used % _BLOCK:
                ctypes.memset(self._chunk.address + self._used, 0, padding)
                self._used += padding
            self._submit()
        self._staging.wait()
        self._flush.result()
        os.ftruncate(self._fd, self._nbytes)
        os.fsync(self._fd)

    def close(self) -> None:
        """Wait for the threads, whatever came of their work, and close."""
        wait([self._flush, *self._staging.pending()])
        os.close(self._fd)

    def _submit(self) -> None:
        assert self._chunk is not None
        data, offset, self._offset = self._chunk.bytes[: self._used], self._offset, self._offset + self._used
        self._chunk.pending.append(self._disk.submit(self._write, data, offset))
        self._chunk = None
        if not self._direct and offset - self._flushed >= _FLUSH_BYTES and self._flush.done():
            self._flush.result()  # a disk error is reported once, so it must not be lost here
            self._flush, self._flushed = self._disk.submit(os.fsync, self._fd), offset

    def _write(self, data: memoryview, offset: int) -> None:
        while len(data):
            direct = self._direct
            try:
                written = os.pwrite(self._fd, data if direct else data[:_WRITE_BYTES], offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._set_direct(False)  # taken by the file system when it was set, but not with these blocks
                continue
            data, offset = data[written:], offset + written

    def _set_direct(self, wanted: bool) -> None:
        flag = getattr(os, "O_DIRECT", 0)  # Linux has it
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~flag
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | (flag if wanted else 0))
        except OSError:  # tmpfs of Linux before 6.5, some network file systems
            self._direct = False
        else:
            self._direct = wanted and bool(flag)


def _reserve(fd: int, nbytes: int) -> None:
    """Have the file system set the whole file's blocks aside, where it can: one step in place of one per write."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):  # Linux has it; posix_fallocate would write to every block where it is missing
        return
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if nbytes and libc.fallocate(fd, 0, 0, nbytes) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
