"""Write tensors to safetensors files as a stream: header first, then tensor after tensor, hashed on the way.

The safetensors library writes a file in one call from tensors that are all in memory. A conversion knows every size
before it has any data, so it can write the header at once and then let the data pass through, whatever the total.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .buffers import Buffer, Ring
from .dtypes import bits_of
from .errors import CheckpointError
from .manifest import FileRecord
from .move import stream
from .plan import Output, Plan
from .quantized_format import write_metadata
from .store import Store
from .strict_json import dump_object
from .weight_files import INDEX, SINGLE

MAX_SHARD_BYTES = 5_000_000_000

_WRITE_BYTES = 32 << 10
"""Bytes per write call. Larger ones make Linux (6.18, ext4) look for large contiguous pages for its cache, which took
up to eight times the processor time of the whole copy (0.5 s/GiB at 32 KiB; 1 to 3.9 s from 64 KiB to 4 MiB)."""

_FLUSH_BYTES = 128 << 20
"""Bytes after which a thread starts flushing, so that the disk works while data is still moving."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) as data is written."""


@dataclass(frozen=True)
class Shard:
    """One file of a plan."""

    file: str
    outputs: tuple[Output, ...]
    metadata: Mapping[str, str]


def split_shards(plan: Plan, max_shard_bytes: int) -> list[Shard]:
    """Distribute outputs over files of at most `max_shard_bytes` of data each, in plan order.

    A single larger output gets a file of its own, and the entries of one quantized parameter stay together.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; allowed: a positive number")
    groups: list[list[Output]] = [[]]
    size = 0
    for unit in _units(plan):
        nbytes = sum(output.nbytes for output in unit)
        if groups[-1] and size + nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1] += unit
        size += nbytes
    names = (
        [SINGLE]
        if len(groups) == 1
        else [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    )
    shards = []
    for name, group in zip(names, groups):
        present = {output.name for output in group}
        metadata = write_metadata({n: plan.formats[n] for n in plan.formats if n in present})
        shards.append(Shard(name, tuple(sorted(group, key=_alignment)), metadata))
    return shards


def _units(plan: Plan) -> Iterable[list[Output]]:
    """Outputs one by one, but all entries of a quantized parameter (consecutive, its name first) as one unit."""
    unit: list[Output] = []
    owner: str | None = None
    for output in plan.outputs:
        if unit and not (owner is not None and output.name.startswith(owner) and output.name not in plan.formats):
            yield unit
            unit = []
        if not unit:
            owner = output.name if output.name in plan.formats else None
        unit.append(output)
    if unit:
        yield unit


def _alignment(output: Output) -> int:
    """Sort key: plan order, but sizes that would misalign what follows go last, widest dtype first."""
    return 0 if output.nbytes % 8 == 0 else 64 // (bits_of(output.dtype) or 8)


def header_bytes(shard: Shard) -> bytes:
    """Return the file's header, length prefix included, padded so that the data starts at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": dict(shard.metadata)}
    position = 0
    for output in shard.outputs:
        offsets = [position, position + output.nbytes]
        entries[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": offsets}
        position += output.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_weights(
    folder: Path, plan: Plan, store: Store, *, max_shard_bytes: int = MAX_SHARD_BYTES, progress: Progress | None = None
) -> dict[str, FileRecord]:
    """Write all outputs of the plan, and an index where there is more than one file; return file name -> record."""
    shards = split_shards(plan, max_shard_bytes)
    records: dict[str, FileRecord] = {}
    total, done, ring = plan.total_bytes, 0, Ring()
    # One thread hashes a buffer (hashlib releases the interpreter lock), another waits for the disk, while this one
    # reads and writes the next buffer.
    with ThreadPoolExecutor(max_workers=1) as hasher, ThreadPoolExecutor(max_workers=1) as flusher:
        for shard in shards:
            with HashedFile(folder / shard.file, hasher, flusher) as file:
                file.write(header_bytes(shard))
                for output in shard.outputs:
                    for buffer, nbytes in stream(store, output, ring):
                        file.write_buffer(buffer, nbytes)
                        done += nbytes
                        if progress is not None:
                            progress(done, total)
            records[shard.file] = file.record()
    if len(shards) > 1:
        weight_map = {output.name: shard.file for shard in shards for output in shard.outputs}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        records[INDEX] = write_small_file(folder / INDEX, dump_object(index))
    return records


def write_small_file(path: Path, data: bytes) -> FileRecord:
    """Write a file that fits in memory; it is flushed with its folder."""
    path.write_bytes(data)
    return FileRecord(hashlib.sha256(data).hexdigest(), len(data))


class HashedFile:
    """A file being written, hashed (SHA-256) and flushed to the disk by two other threads meanwhile."""

    def __init__(self, path: Path, hasher: ThreadPoolExecutor, flusher: ThreadPoolExecutor) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._hasher, self._flusher = hasher, flusher
        self._digest, self._size = hashlib.sha256(), 0
        self._flushed, self._flush = 0, flusher.submit(lambda: None)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            wait([self._flush])
            if kind is None:
                self._flush.result()
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def write(self, data: bytes | memoryview) -> None:
        """Write and hash on this thread."""
        self._digest.update(data)
        self._write(data)

    def write_buffer(self, buffer: Buffer, nbytes: int) -> None:
        """Write the first bytes of a buffer, and hash them while this thread goes on."""
        data = buffer.bytes[:nbytes]
        buffer.pending = self._hasher.submit(self._digest.update, data)
        self._write(data)
        if self._size - self._flushed >= _FLUSH_BYTES and self._flush.done():
            self._flush.result()  # a disk error is reported once, so it must not be lost here
            self._flush, self._flushed = self._flusher.submit(os.fsync, self._fd), self._size

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            written = os.write(self._fd, view[:_WRITE_BYTES])
            self._size += written
            view = view[written:]

    def record(self) -> FileRecord:
        """Return the digest and size; waits for the hashing thread."""
        return FileRecord(self._hasher.submit(self._digest.hexdigest).result(), self._size)
