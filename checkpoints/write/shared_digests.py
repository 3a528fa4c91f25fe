"""One SHA-256 for a byte that is read and written: the check of a source tensor from the digests of what is written.

The digest of a tensor is made of the digests of its parts (`io/tensor_hash.py`). Where a conversion moves whole parts,
as the rows of q, k and v out of a joined parameter or a tensor to another file, the part that it writes is the part
that it read, and the writer hashes it anyway. A source tensor all of whose parts go whole into outputs is therefore not
hashed while it is read: the digests of its parts are gathered from the outputs, put into the order of the source, and
their digest is compared with the source's manifest.

Every other tensor keeps its separate check (`folder/reading_checks.py`): one that is converted, transposed or
computed from, one of which parts are cut or go nowhere, and one whose manifest lists the digest of all its bytes, as
manifests of earlier releases do, unless it is small enough to be one part.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..io.sha256 import SHA256_BYTES
from ..io.store import FileStore, Store
from ..io.tensor_hash import ROWS_PER_PART, digest_of_parts, part_bytes, part_count
from ..mapping.plan import OutputTensor
from ..mapping.stream import CopiedBytes, copied_bytes


class SharedParts(NamedTuple):
    """Parts `begin` ... `begin + count - 1` of an output are the parts of a source tensor from `source_begin` on."""

    source: str
    source_begin: int
    begin: int
    count: int


@dataclass
class _Gathered:
    """The digests of the parts of one source tensor, zeros where they have not come yet; runs: how many are missing."""

    parts: int
    runs: int
    digests: bytearray = field(default_factory=bytearray)


class SharedDigests:
    """The source tensors of a conversion that are checked by the digests of what is written; used by several threads.

    Memory: 32 bytes for every part of a source tensor, from the first output that has some of it to the last. Parts
    have 4 KiB or more, mostly 128 KiB to 1 MiB, and the outputs of a tensor mostly follow one another; where none did,
    it would be a 4,000th of a model whose rows have 2 KiB, and a 128th at worst.
    """

    def __init__(self, files: FileStore, store: Store, outputs: Sequence[OutputTensor]) -> None:
        """files: what the plan's store reads. The tensors that are shared are left to `add` from here on."""
        self._files, self._store, self._lock = files, store, threading.Lock()
        found: dict[str, list[tuple[str, SharedParts]]] = defaultdict(list)
        for output in outputs:
            for copied in copied_bytes(store, output):
                shared = _shared_parts(files, output, copied)
                if shared is not None:
                    found[copied.source].append((output.name, shared))
        self._of_output: dict[str, list[SharedParts]] = defaultdict(list)
        self._gathered: dict[str, _Gathered] = {}
        for source, runs in found.items():
            parts = part_count(files.tensors[source].nbytes, files.part_bytes(source) or 1)
            if _cover([run for _, run in runs], parts):
                self._gathered[source] = _Gathered(parts, len(runs))
                for output, run in runs:
                    self._of_output[output].append(run)
        files.leave_to_reader(self._gathered)

    def add(self, output: str, parts: bytes) -> None:
        """Take the digests of all parts of an output that was written, or found written, once for each output."""
        with self._lock:
            for run in self._of_output.pop(output, ()):
                self._gather(run, parts[SHA256_BYTES * run.begin : SHA256_BYTES * (run.begin + run.count)])

    def _gather(self, run: SharedParts, digests: bytes) -> None:
        gathered = self._gathered[run.source]
        gathered.digests = gathered.digests or bytearray(SHA256_BYTES * gathered.parts)
        begin = SHA256_BYTES * run.source_begin
        before = gathered.digests[begin : begin + len(digests)]
        if any(before) and not _agree(before, digests):
            self._files.compare_digests([(run.source, "")])  # read twice, for two outputs, with different bytes
        gathered.digests[begin : begin + len(digests)] = digests
        gathered.runs -= 1
        if not gathered.runs:
            self._files.compare_digests([(run.source, digest_of_parts(gathered.digests))])
            del self._gathered[run.source]

    def check_sources(self, outputs: Iterable[OutputTensor]) -> None:
        """Check what outputs come from that an earlier run has written: it ended before it knew what its checks found.

        The sources of a computed output are not known, so that is everything then.
        """
        names: set[str] = set()
        for output in outputs:
            if output.compute is not None or not all(self._store.can_read_bytes(p.source) for p in output.pieces):
                names.update(self._files.tensors)
                break
            names.update(piece.source for piece in output.pieces)
        self._files.check(sorted(names))

    def check_complete(self) -> None:
        """Raise RuntimeError where an output did not come: a source tensor would go unchecked."""
        if self._gathered:
            raise RuntimeError(f"nothing has compared {min(self._gathered)} with its manifest")


def _shared_parts(files: FileStore, output: OutputTensor, copied: CopiedBytes) -> SharedParts | None:
    """Return the parts of the source tensor that lie in copied bytes and are parts of the output, too."""
    size, source_bytes = files.part_bytes(copied.source), files.tensors[copied.source].nbytes
    if not size or size != part_bytes(output.dtype, output.shape, ROWS_PER_PART):
        return None
    if (copied.begin - copied.source_begin) % size:
        return None
    end = copied.source_begin + copied.nbytes
    first, last = -(-copied.source_begin // size), end // size
    if end == source_bytes and end % size and copied.begin + copied.nbytes == output.nbytes:
        last += 1  # both tensors end with a shorter part, this one
    if first >= last:
        return None
    return SharedParts(copied.source, first, first + (copied.begin - copied.source_begin) // size, last - first)


def _cover(runs: Sequence[SharedParts], parts: int) -> bool:
    """Whether the runs have every part of a source tensor at least once."""
    position = 0
    for run in sorted(runs, key=lambda run: run.source_begin):
        if run.source_begin > position:
            return False
        position = max(position, run.source_begin + run.count)
    return position == parts


def _agree(before: bytes | bytearray, digests: bytes) -> bool:
    """Whether digests that came before, zeros where none did, are equal to those that come now."""
    ends = range(0, len(digests), SHA256_BYTES)
    pairs = ((before[begin : begin + SHA256_BYTES], digests[begin : begin + SHA256_BYTES]) for begin in ends)
    return all(old == new or not any(old) for old, new in pairs)
