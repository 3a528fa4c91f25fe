"""Write tensors to safetensors files as a stream: header first, then tensor after tensor, hashed on the way.

The safetensors library writes a file in one call from tensors that are all in memory. A conversion knows every size
before it has any data, so it can write the header at once and then let the data pass through, whatever the total.

Several files are written at once, each through its separate buffers and threads (a `Lane`), with the same bytes
whatever their number. Files with computed tensors take turns: one computes at a time, so memory holds one tensor.

`write_tensors` writes one file of tensors in memory through the same path.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Self

from te_models.lazy import torch

from ..io.atomic import flush
from ..io.buffers import Buffer
from ..io.disk_file import DiskFile
from ..io.dtypes import dtype_name
from ..io.hashing import Digests, FileRecord, Lane
from ..io.store import MemoryStore, Store
from ..io.threads import ByteProgress, Progress, cores, run_all
from ..io.weight_files import INDEX
from ..mapping.plan import OutputTensor
from ..mapping.stream import stream_output
from .resume import Journal
from .shards import Shard, alignment_key, header_bytes, index_bytes
from .shared_digests import SharedDigests

MAX_FILES_AT_ONCE = 4
"""Each file at work has buffers of 12 MiB."""


def write_weights(
    folder: Path,
    shards: Sequence[Shard],
    store: Store,
    *,
    journal: Journal | None = None,
    shared: SharedDigests | None = None,
    progress: Progress | None = None,
    file_digests: bool = False,
) -> dict[str, FileRecord]:
    """Write all files, and an index where there is more than one; return file name -> record.

    Arguments:
        journal: of an earlier run that was killed; files that it finished are checked and kept.
        shared: gets the digests of the parts of all outputs.
        file_digests: hash the bytes of each file as a whole, too, see `FileRecord`.
    """
    at_once = min(cores(), MAX_FILES_AT_ONCE)
    bytes_done = ByteProgress(sum(shard.nbytes for shard in shards), progress)
    records: dict[str, FileRecord] = {}
    if journal is not None:
        records = journal.keep(folder, shards, bytes_done, at_once, file_digests=file_digests, shared=shared)
    computing = threading.Lock()
    parts = None if shared is None else shared.add

    def write(shard: Shard) -> FileRecord:
        computed = any(output.compute is not None for output in shard.outputs)
        with computing if computed else nullcontext(), Lane() as lane:
            header = header_bytes(shard)
            digests, nbytes = Digests(lane, whole=file_digests, parts=parts), len(header) + shard.nbytes
            with HashedFile(folder / shard.file, nbytes, lane, digests) as file:
                file.write_header(header)
                for output in shard.outputs:
                    missing = output.nbytes
                    digests.begin_tensor(output.name, output.dtype, output.shape)
                    for buffer, count in stream_output(store, output, lane.ring):
                        file.write_buffer(buffer, count)
                        bytes_done.add(count)
                        missing -= count
                    buffer = None  # a part of a computed tensor: need not outlive it
                    if missing:  # a defect of ours that the next reader would otherwise have to find
                        written = output.nbytes - missing
                        raise RuntimeError(f"{output.name} has {written} bytes, planned {output.nbytes}")
            record = digests.record(nbytes)
        if journal is not None:
            journal.add(shard, record)
        return record

    left = [shard for shard in shards if shard.file not in records]
    written = run_all(write, left, at_once, bytes_done.stop)
    if shared is not None:
        shared.check_sources(output for shard in shards if shard.file in records for output in shard.outputs)
    records |= {shard.file: record for shard, record in zip(left, written)}
    if len(shards) > 1:
        records[INDEX] = write_small_file(folder / INDEX, index_bytes(shards))
    return {name: records[name] for name in (*(shard.file for shard in shards), INDEX) if name in records}


def write_small_file(path: Path, data: bytes) -> FileRecord:
    """Write a file that fits in memory; it is flushed with its folder."""
    path.write_bytes(data)
    return FileRecord(hashlib.sha256(data).hexdigest(), len(data))


class HashedFile:
    """A file being written, hashed and brought to the disk by threads."""

    def __init__(self, path: Path, nbytes: int, lane: Lane, digests: Digests) -> None:
        self._file, self._digests = DiskFile(path, nbytes, lane.staging, lane.disk), digests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._file.finish()
        finally:
            self._file.close()

    def write_header(self, data: bytes) -> None:
        """Write bytes that belong to no tensor."""
        self._digests.add_header(data)
        memory = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
        self._file.append(ctypes.addressof(memory), len(data))

    def write_buffer(self, buffer: Buffer, nbytes: int) -> None:
        """Write the first bytes of a buffer, and hash them while this thread goes on."""
        self._digests.add(buffer, buffer.bytes[:nbytes])
        self._file.append(buffer.address, nbytes)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a file with the permissions of a new file (under the umask), and return its digests; an existing one stays
    until it is complete.

    Tensors are on any device and need not be contiguous; every bit is kept. Raises OSError that names the file where it
    cannot be written.
    """
    outputs = [OutputTensor(n, dtype_name(t.dtype), tuple(t.shape), compute=_parts(t)) for n, t in tensors.items()]
    partial = path.with_name(f".{path.name}.partial")
    shard = Shard(partial.name, tuple(sorted(outputs, key=alignment_key)), metadata or {})
    try:
        partial.unlink(missing_ok=True)
        (record,) = write_weights(path.parent, [shard], MemoryStore({})).values()
        partial.rename(path)
        flush(path.parent)
    except OSError as error:
        raise OSError(f"{path.name}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return record


def _parts(tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    return lambda: [tensor]
