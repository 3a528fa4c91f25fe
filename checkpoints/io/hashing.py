"""SHA-256 of every tensor of a file, in the one pass that its data makes through memory; no byte is hashed twice.

The digest of a weight file is made of the digest of its header and the digests of its tensors; together they cover
every byte. The digest of a tensor is made of the digests of its parts (`tensor_hash.py`). The digest that `sha256sum`
prints of the same file is computed only where that is asked for, by a separate thread from the same buffers: hashlib
releases the interpreter lock.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from .boxes import Shape
from .buffers import Buffer, Ring
from .errors import CheckpointError
from .header import read_header
from .tensor_hash import ROWS_PER_PART, HashThreads, TensorHash

Parts = Callable[[str, bytes], None]
"""Called with the name of a tensor and the digests of its parts, `SHA256_BYTES` each."""


@dataclass(frozen=True)
class FileRecord:
    """What one file must be: its size in bytes, and its digests in hexadecimal digits.

    Attributes:
        sha256: of all bytes; of weights only where that was asked for, or an earlier release wrote it, else empty.
        tensors: of weights, the digest of each tensor's data.
        header: of weights, the digest of the bytes before the data; empty where a release did not note it.
        digest: of weights without `sha256`: see `joint_digest`.
        rows_per_part: of weights, see `tensor_hash.part_bytes`.
    """

    sha256: str
    size: int
    tensors: dict[str, str] = field(default_factory=dict)
    header: str = ""
    digest: str = ""
    rows_per_part: int = 0

    @property
    def of_weights(self) -> bool:
        """Whether the record is of a safetensors file."""
        return bool(self.digest or self.tensors)


def joint_digest(header: str, tensors: Iterable[str]) -> str:
    """Return the digest of a weight file: SHA-256 of the digests of its header and its tensors, in the order of their
    data, in hexadecimal digits, with a newline after each."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in (header, *tensors)).encode()).hexdigest()


class Lane:
    """The buffers and threads through which one file at a time passes: those that hash, two that wait for the disk.

    ring: where data is put together; staging: where it waits for the disk.
    """

    def __init__(self) -> None:
        self.ring, self.staging = Ring(), Ring(buffers=4)
        self.of_file, self.disk = (ThreadPoolExecutor(max_workers=count) for count in (1, 2))
        self.of_tensors = HashThreads()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.of_tensors:
            for thread in (self.of_file, self.disk):
                thread.shutdown()


class Digests:
    """The digests of one file while its bytes pass in order."""

    def __init__(
        self, lane: Lane, *, whole: bool = False, rows_per_part: int = ROWS_PER_PART, parts: Parts | None = None
    ) -> None:
        """whole: hash all its bytes at once, too. parts: called for each tensor, by the thread that hashes its end."""
        self._lane, self._whole = lane, hashlib.sha256() if whole else None
        self._rows_per_part, self._parts = rows_per_part, parts
        self._tensors: dict[str, TensorHash] = {}
        self._passing: TensorHash | None = None
        self._header = hashlib.sha256()

    def add_header(self, data: bytes) -> None:
        """Hash bytes that belong to no tensor."""
        self._header.update(data)
        if self._whole is not None:
            self._lane.of_file.submit(self._whole.update, data)

    def begin_tensor(self, name: str, dtype: str, shape: Shape) -> None:
        """Say which tensor the bytes that follow are."""
        then = None if self._parts is None else partial(self._parts, name)
        self._passing = TensorHash(dtype, shape, self._rows_per_part, threads=self._lane.of_tensors, then=then)
        self._tensors[name] = self._passing

    def add(self, buffer: Buffer, data: memoryview) -> None:
        """Hash `data`, a part of `buffer`; the buffer is not reused before the threads have read it."""
        assert self._passing is not None, "a tensor begins before its bytes"
        if self._whole is not None:
            buffer.pending.append(self._lane.of_file.submit(self._whole.update, data))
        buffer.pending.extend(self._passing.update(data))

    def record(self, size: int) -> FileRecord:
        """Wait for the threads and return the digests of a file of `size` bytes."""
        self._lane.of_tensors.wait()
        tensors = {name: tensor.digest for name, tensor in self._tensors.items()}
        if missing := [name for name, digest in tensors.items() if not digest]:  # a defect of ours
            raise RuntimeError(f"not all bytes of {missing[0]} were hashed")
        header, rows = self._header.hexdigest(), self._rows_per_part
        if self._whole is None:
            return FileRecord("", size, tensors, header, joint_digest(header, tensors.values()), rows)
        whole = self._lane.of_file.submit(self._whole.hexdigest).result()
        return FileRecord(whole, size, tensors, header, rows_per_part=rows)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file; one that cannot be read raises CheckpointError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None


def record_of(
    path: Path,
    lane: Lane,
    moved: Callable[[int], None] = lambda nbytes: None,
    *,
    whole: bool = False,
    rows_per_part: int = ROWS_PER_PART,
    parts: Parts | None = None,
) -> FileRecord:
    """Read a safetensors file and return its digests; a malformed one raises CheckpointError.

    Arguments:
        moved: called with the number of bytes of each buffer read.
        whole: with the digest of all bytes, see `FileRecord`.
        rows_per_part: see `tensor_hash.part_bytes`.
        parts: called for each tensor.
    """
    header = read_header(path)
    digests = Digests(lane, whole=whole, rows_per_part=rows_per_part, parts=parts)
    with path.open("rb", buffering=0) as file:
        digests.add_header(file.read(header.data_start))
        size = header.data_start
        for name, info in header.tensors.items():
            digests.begin_tensor(name, info.dtype, info.shape)
            for begin in range(0, info.nbytes, lane.ring.nbytes):
                buffer, n = lane.ring.next(), min(lane.ring.nbytes, info.nbytes - begin)
                _read_exactly(file.fileno(), buffer.bytes[:n], path)
                digests.add(buffer, buffer.bytes[:n])
                moved(n)
            size += info.nbytes
    return digests.record(size)


def _read_exactly(fd: int, data: memoryview, path: Path) -> None:
    done = 0
    while done < len(data):
        n = os.readv(fd, [data[done:]])
        if n == 0:
            raise CheckpointError(f"{path.name} became shorter while it was read")
        done += n
