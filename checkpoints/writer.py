"""Write tensors to safetensors files as a stream: header first, then tensor after tensor, hashed on the way.

The safetensors library writes a file in one call from tensors that are all in memory. A conversion knows every size
before it has any data, so it can write the header at once and then let the data pass through, whatever the total.

Several files are written at once, each through buffers and threads of its own (a `Lane`), with the same bytes whatever
their number. Files with computed tensors take turns: one computes at a time, so memory stays that of one tensor.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from typing import Self

from .buffers import Buffer
from .hashing import Digests, FileRecord, Lane
from .meter import Meter, Progress
from .move import stream
from .resume import Journal
from .shards import Shard, header_bytes, index_bytes
from .store import Store
from .threads import cores, run_all
from .weight_files import INDEX

MAX_FILES_AT_ONCE = 4
"""Each file at work has buffers of 8 MiB."""

_WRITE_BYTES = 32 << 10
"""Bytes per write call. Larger ones make Linux (6.18, ext4) look for large contiguous pages for its cache, which took
up to eight times the processor time of the whole copy (0.5 s/GiB at 32 KiB; 1 to 3.9 s from 64 KiB to 4 MiB)."""

_FLUSH_BYTES = 128 << 20
"""Bytes after which a thread starts flushing, so that the disk works while data is still moving."""


def write_weights(
    folder: Path,
    shards: Sequence[Shard],
    store: Store,
    *,
    journal: Journal | None = None,
    progress: Progress | None = None,
    files_at_once: int | None = None,
) -> dict[str, FileRecord]:
    """Write all files, and an index where there is more than one; return file name -> record.

    Arguments:
        journal: of an earlier run that was killed; files that it finished are checked and kept.
        files_at_once: default: as many as there are processor cores, at most MAX_FILES_AT_ONCE.
    """
    at_once = files_at_once or min(cores(), MAX_FILES_AT_ONCE)
    meter = Meter(sum(shard.nbytes for shard in shards), progress)
    records = journal.keep(folder, shards, meter, at_once) if journal is not None else {}
    computing = threading.Lock()

    def write(shard: Shard) -> FileRecord:
        computed = any(output.compute is not None for output in shard.outputs)
        with computing if computed else nullcontext(), Lane() as lane:
            with HashedFile(folder / shard.file, lane) as file:
                file.write_header(header_bytes(shard))
                for output in shard.outputs:
                    missing = output.nbytes
                    for buffer, nbytes in stream(store, output, lane.ring):
                        file.write_buffer(buffer, nbytes)
                        meter.add(nbytes)
                        missing -= nbytes
                    buffer = None  # a part of a computed tensor, which need not outlive it
                    if missing:  # a defect of ours, which would otherwise be the next reader's to find
                        written = output.nbytes - missing
                        raise RuntimeError(f"{output.name} has {written} bytes, planned {output.nbytes}")
                    file.digests.end_tensor(output.name)
            record = file.record()
        if journal is not None:
            journal.add(shard, record)
        return record

    left = [shard for shard in shards if shard.file not in records]
    written = run_all(write, left, at_once, meter.stop)
    records |= {shard.file: record for shard, record in zip(left, written)}
    if len(shards) > 1:
        records[INDEX] = write_small_file(folder / INDEX, index_bytes(shards))
    return {name: records[name] for name in (*(shard.file for shard in shards), INDEX) if name in records}


def write_small_file(path: Path, data: bytes) -> FileRecord:
    """Write a file that fits in memory; it is flushed with its folder."""
    path.write_bytes(data)
    return FileRecord(hashlib.sha256(data).hexdigest(), len(data))


class HashedFile:
    """A file being written, hashed (as a whole and tensor by tensor) and flushed to the disk by threads meanwhile."""

    def __init__(self, path: Path, lane: Lane) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.digests = Digests(lane)
        self._disk, self._size = lane.disk, 0
        self._flushed, self._flush = 0, self._disk.submit(lambda: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            wait([self._flush])
            if kind is None:
                self._flush.result()
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def write_header(self, data: bytes) -> None:
        """Write bytes that belong to no tensor."""
        self.digests.add_header(data)
        self._write(data)

    def write_buffer(self, buffer: Buffer, nbytes: int) -> None:
        """Write the first bytes of a buffer, and hash them while this thread goes on."""
        data = buffer.bytes[:nbytes]
        self.digests.add(buffer, data)
        self._write(data)
        if self._size - self._flushed >= _FLUSH_BYTES and self._flush.done():
            self._flush.result()  # a disk error is reported once, so it must not be lost here
            self._flush, self._flushed = self._disk.submit(os.fsync, self._fd), self._size

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            written = os.write(self._fd, view[:_WRITE_BYTES])
            self._size += written
            view = view[written:]

    def record(self) -> FileRecord:
        """Return the digests and the size; waits for the hashing threads."""
        return self.digests.record(self._size)
