"""A file is what was appended, whichever way its bytes took to the disk, and errors of the threads are not lost."""

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from te_models.checkpoints.io import disk_file
from te_models.checkpoints.io.buffers import Ring
from te_models.checkpoints.io.disk_file import DiskFile

CHUNK = 8192
SIZES = (13, CHUNK - 13, 1, 3 * CHUNK, 4095, 0, 5 * CHUNK + 77)


def data() -> bytes:
    return (
        torch.randint(256, (sum(SIZES),), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        .numpy()
        .tobytes()
    )


def write(path: Path, content: bytes, nbytes: int | None = None) -> DiskFile:
    """Write a file in parts of SIZES; return it, closed."""
    with ThreadPoolExecutor(2) as disk:
        file = DiskFile(path, len(content) if nbytes is None else nbytes, Ring(3, CHUNK), disk)
        memory, begin = torch.frombuffer(bytearray(content), dtype=torch.uint8), 0
        try:
            for size in SIZES:
                file.append(memory.data_ptr() + begin, size)
                begin += size
            file.finish()
        finally:
            file.close()
    return file


def refused(real: Callable[..., int], code: int, when: Callable[[int], bool]) -> Callable[..., int]:
    """Return os.pwrite, failing for descriptors for which `when` is true."""

    def pwrite(fd: int, part: memoryview, offset: int) -> int:
        if when(fd):
            raise OSError(code, os.strerror(code))
        return real(fd, part, offset)

    return pwrite


def direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_a_file_is_what_was_appended(tmp_path: Path) -> None:
    """Past the cache, in parts and with a size that fit no block."""
    write(tmp_path / "file", data())
    assert (tmp_path / "file").read_bytes() == data()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_blocks_that_a_file_system_refuses_go_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the flag, and then refuses each aligned write."""
    monkeypatch.setattr(os, "pwrite", refused(os.pwrite, errno.EINVAL, direct))
    file = write(tmp_path / "file", data())
    assert (tmp_path / "file").read_bytes() == data() and not file._direct


def test_a_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write is short there, and flushed now and then."""
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    monkeypatch.setattr(disk_file, "_WRITE_BYTES", 1000)
    monkeypatch.setattr(disk_file, "_FLUSH_BYTES", 2 * CHUNK)
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(fsync(fd)))
    write(tmp_path / "file", data())
    assert (tmp_path / "file").read_bytes() == data() and len(flushed) > 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_error_is_raised(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the append or the finish that comes after it."""
    monkeypatch.setattr(os, "pwrite", refused(os.pwrite, code, lambda fd: True))
    with pytest.raises(OSError, match=os.strerror(code)):
        write(tmp_path / "file", data())


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="only Linux reserves space")
def test_room_is_reserved_before_anything_is_written(tmp_path: Path) -> None:
    """A file larger than any may be fails at once. (To try one larger than the disk would fill it for a moment.)"""
    with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write(tmp_path / "file", data(), nbytes=1 << 62)
    assert (tmp_path / "file").stat().st_size == 0


def test_an_existing_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", data())
    assert (tmp_path / "file").read_text() == "mine"
