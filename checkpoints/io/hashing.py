"""SHA-256 of a file and of every tensor in it, by two threads, in the one pass that its data makes through memory.

The two digests read the same buffers, and hashlib releases the interpreter lock, so on a machine with cores to spare
they cost no more time than one; no byte is read a second time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from .buffers import Buffer, Ring
from .errors import CheckpointError
from .header import read_header


@dataclass(frozen=True)
class FileRecord:
    """What one file must be: its digest, its size in bytes, and for weights the digest of each tensor's data, and of
    the header before them (empty in the record of a release that did not note it)."""

    sha256: str
    size: int
    tensors: dict[str, str] = field(default_factory=dict)
    header: str = ""


class Lane:
    """The buffers and threads through which one file at a time passes: two that hash, two that wait for the disk.

    ring: where data is put together; staging: where it waits for the disk.
    """

    def __init__(self) -> None:
        self.ring, self.staging = Ring(), Ring(buffers=4)
        self.of_file, self.of_tensor, self.disk = (ThreadPoolExecutor(max_workers=count) for count in (1, 1, 2))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in (self.of_file, self.of_tensor, self.disk):
            thread.shutdown()


class Digests:
    """The digests of one file while its bytes pass in order."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._whole = lane, hashlib.sha256()
        self._part = hashlib.sha256()  # of the tensor that passes now
        self._tensors: dict[str, Future[str]] = {}
        self._header = hashlib.sha256()

    def add_header(self, data: bytes) -> None:
        """Hash bytes that belong to no tensor."""
        self._header.update(data)
        self._lane.of_file.submit(self._whole.update, data)

    def add(self, buffer: Buffer, data: memoryview) -> None:
        """Hash `data`, a part of `buffer`, which is not reused before both threads have read it."""
        buffer.pending.append(self._lane.of_file.submit(self._whole.update, data))
        buffer.pending.append(self._lane.of_tensor.submit(self._part.update, data))

    def end_tensor(self, name: str) -> None:
        """Say that the bytes since the last tensor ended are those of `name`."""
        self._tensors[name] = self._lane.of_tensor.submit(self._part.hexdigest)
        self._part = hashlib.sha256()

    def record(self, size: int) -> FileRecord:
        """Wait for the threads and return the digests of a file of `size` bytes."""
        whole = self._lane.of_file.submit(self._whole.hexdigest).result()
        tensors = {name: digest.result() for name, digest in self._tensors.items()}
        return FileRecord(whole, size, tensors, self._header.hexdigest())


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file; one that cannot be read raises CheckpointError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None


def record_of(path: Path, lane: Lane, moved: Callable[[int], None] = lambda nbytes: None) -> FileRecord:
    """Read a safetensors file and return its digests; a malformed one raises CheckpointError.

    moved: called with the number of bytes of each part read.
    """
    header = read_header(path)
    digests = Digests(lane)
    with path.open("rb", buffering=0) as file:
        digests.add_header(file.read(header.data_start))
        size = header.data_start
        for name, info in header.tensors.items():
            for begin in range(0, info.nbytes, lane.ring.nbytes):
                buffer, n = lane.ring.next(), min(lane.ring.nbytes, info.nbytes - begin)
                _read_exactly(file.fileno(), buffer.bytes[:n], path)
                digests.add(buffer, buffer.bytes[:n])
                moved(n)
            digests.end_tensor(name)
            size += info.nbytes
    return digests.record(size)


def _read_exactly(fd: int, data: memoryview, path: Path) -> None:
    done = 0
    while done < len(data):
        n = os.readv(fd, [data[done:]])
        if n == 0:
            raise CheckpointError(f"{path.name} became shorter while it was read")
        done += n
