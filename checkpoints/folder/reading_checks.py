"""Check a folder against its manifest.json while it is read: small files and headers at once, tensors as they stream.

A thread hashes a tensor from the moment when a first part of it is asked for, while the reader goes on: both read the
same pages of the system's cache, and hashlib releases the interpreter lock. The reader never gets further ahead than
`_AHEAD` bytes, so that the pages are still there, and whoever has read asks at the end (`finish`) whether all tensors
were as listed, before anything is done with them.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..io.buffers import CHUNK_BYTES
from ..io.errors import CheckpointError, quote, shorten
from ..io.hashing import FileRecord, file_digest
from ..io.manifest import MANIFEST, check_joint_digest, is_manifest, may_be_edited, note_edited, read_manifest
from ..io.store import FileStore
from ..io.tensor_hash import TensorHash, part_bytes
from ..io.threads import cores
from ..io.weight_files import file_inside

MAX_THREADS = 4
_AHEAD = 1 << 30
_SKIP = "verify=False, or --no-verify, reads the folder all the same"


def check_while_reading(folder: Path, store: FileStore, *, ours: bool) -> None:
    """Compare a folder that has a manifest with it: now its small files, the sizes, headers and names of its weights;
    every tensor when it is read from `store`, until `store.finish_checks`.

    Small files of a Hugging Face folder that decide no number may have been edited: an EditedFileWarning names each. A
    folder without manifest.json, and one of another program's (ours: whether the folder is te_models' own), is left
    as it is. Raises CheckpointError.
    """
    if not ours and not is_manifest(folder):
        return
    if not (folder / MANIFEST).exists() and not (folder / MANIFEST).is_symlink():
        return
    records = read_manifest(folder, limit=64 * (len(store.tensors) + len(store.paths)) + 10_000)
    _check_weights(store, records)
    edited = []
    for name in (n for n in records if n not in store.paths and (folder / n).exists()):
        # weights aside; a file that was removed is missed by who needs it
        try:
            _check_small(name, file_inside(folder, name, MANIFEST), records[name])
        except _EditedError:
            if not may_be_edited(folder, name):
                raise
            edited.append(name)
    note_edited(folder, edited)
    store.guard(TensorDigests(store, records))


def _check_weights(store: FileStore, records: Mapping[str, FileRecord]) -> None:
    names: dict[str, dict[str, None]] = {file: {} for file in store.paths}
    for name, file in store.file_of.items():
        names[file][name] = None
    for file, path in store.paths.items():
        record, held = records.get(file), names[file]
        if record is None:
            raise CheckpointError(f"{MANIFEST} does not list {quote(file)}; {_SKIP}")
        size = path.stat().st_size
        if size != record.size:
            raise CheckpointError(f"{file} has {size} bytes and {MANIFEST} says {record.size}; {_SKIP}")
        differing = [name for name in record.tensors if name not in held]
        differing += sorted(held.keys() - record.tensors.keys())
        if differing:
            raise CheckpointError(f"{file} and {MANIFEST} differ in which tensors there are: {shorten(differing)}")
        if record.header and store.header_digests[file] != record.header:
            raise CheckpointError(
                f"the header of {file} does not have the SHA-256 that {MANIFEST} says; it was changed or damaged; "
                f"{_SKIP}"
            )
        check_joint_digest(file, record, held)


def _check_small(name: str, path: Path, record: FileRecord) -> None:
    size = path.stat().st_size
    if size != record.size:
        raise _EditedError(f"{name} has {size} bytes and {MANIFEST} says {record.size}; {_SKIP}")
    if file_digest(path) != record.sha256:
        raise _EditedError(f"{name} does not have the SHA-256 that {MANIFEST} says; it was changed or damaged; {_SKIP}")


class _EditedError(CheckpointError):
    """A small file is not as listed."""


class TensorDigests:
    """SHA-256 of the tensors of a store, each from its first use on, compared with those that the manifest lists."""

    def __init__(self, store: FileStore, records: Mapping[str, FileRecord]) -> None:
        """records: of the store's files, and of others."""
        self._store = store
        self._expected = {name: digest for file in store.paths for name, digest in records[file].tensors.items()}
        self._rows_per_part = {file: records[file].rows_per_part for file in store.paths}
        self._started: set[str] = set()
        self._running: deque[tuple[int, Future[None]]] = deque()
        self._ahead, self._damaged = 0, list[str]()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._share: frozenset[str] | None = None

    def started(self, name: str) -> None:
        """Start hashing a tensor, a part of which is about to be read, unless that has happened."""
        if name in self._started or self._share is not None:
            return
        self._start(name)

    def take_share(self, rank: int, ranks: int) -> None:
        """Hash the tensors of one of several readers who share the work, whatever is read: tensors that follow one
        another in the files, about as many bytes for each reader, every tensor for exactly one."""
        names = [name for name in self._store.tensors if name in self._expected]
        sizes = [self._store.tensors[name].nbytes + 1 for name in names]
        total, position, share = sum(sizes), 0, list[str]()
        for name, size in zip(names, sizes):
            if (position + size // 2) * ranks // total == rank:
                share.append(name)
            position += size
        self._share = frozenset(share)
        for name in share:
            self._start(name)

    def part_bytes(self, name: str) -> int | None:
        """Return how many bytes of a tensor each digest covers of which the listed one is made, None for a tensor that
        is not listed."""
        if name not in self._expected:
            return None
        info = self._store.tensors[name]
        return part_bytes(info.dtype, info.shape, self._rows_per_part[self._store.file_of[name]])

    def leave_to_reader(self, names: Iterable[str]) -> None:
        """Do not hash these tensors: the reader does, and hands the digests to `compare`."""
        self._started.update(names)

    def compare(self, digests: Iterable[tuple[str, str]]) -> None:
        """Compare digests of tensors, by name, with the expected ones."""
        self._damaged += {name for name, digest in digests if digest != self._expected[name]}

    def _start(self, name: str) -> None:
        waiting: list[Future[None]] = []
        with self._lock:
            if name in self._started:
                return
            self._started.add(name)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(min(cores(), MAX_THREADS), "sha256")
            nbytes = self._store.tensors[name].nbytes
            self._running.append((nbytes, self._pool.submit(self._check, name)))
            self._ahead += nbytes
            while self._share is None and self._ahead - nbytes > _AHEAD and self._running:
                size, oldest = self._running.popleft()
                self._ahead -= size
                waiting.append(oldest)
        for future in waiting:
            future.result()
        if waiting and self._damaged:
            self.finish()

    def _check(self, name: str) -> None:
        info, rows = self._store.tensors[name], self._rows_per_part[self._store.file_of[name]]
        found, buffer = TensorHash(info.dtype, info.shape, rows), memoryview(bytearray(CHUNK_BYTES))
        nbytes = info.nbytes
        for begin in range(0, nbytes, CHUNK_BYTES):
            if self._stop.is_set():
                return
            part = buffer[: min(CHUNK_BYTES, nbytes - begin)]
            self._store.read_unchecked(name, begin, part)
            found.update(part)
        if found.digest != self._expected[name]:
            self._damaged.append(name)

    def finish(self) -> None:
        """Wait for the digests of all tensors that were read; raise CheckpointError naming those that are damaged."""
        with self._lock:
            running, self._running, self._ahead = self._running, deque(), 0
        for _, future in running:
            future.result()
        if self._damaged:
            names: Sequence[str] = sorted(set(self._damaged))
            what = f"tensor {quote(names[0])} does" if len(names) == 1 else f"the tensors {shorten(names)} do"
            raise CheckpointError(
                f"{self._store.file_of[names[0]]}: {what} not have the SHA-256 that {MANIFEST} says; changed or "
                f"damaged; {_SKIP}"
            )

    def close(self) -> None:
        """End the threads, whatever they are at."""
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
