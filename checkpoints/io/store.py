"""Where tensors come from: weight files on disk, or tensors in memory, behind one small interface.

A store gives the dtype and shape of every tensor without reading data, `read(name, box)` for strided or converting
access, and `read_into` for the common case of a contiguous byte range: straight from the file into the writer's buffer.
Files are read through descriptors: of one that becomes shorter meanwhile a memory map would end the process, a
descriptor reads fewer bytes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from te_models.lazy import torch

from .box_reads import read_box
from .boxes import Box, Shape, full, slices
from .dtypes import bit_width, dtype_name, torch_dtype
from .errors import CheckpointError, quote
from .header import Header, TensorInfo, byte_count, read_header


class Store(Protocol):
    """A read-only collection of named tensors."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of every tensor."""
        ...

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a region of the tensor; callers never write to it."""
        ...

    def can_read_bytes(self, name: str) -> bool:
        """Whether `read_into` works: the tensor is a byte range of a file, where it has the same name."""
        ...

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from byte `begin` on."""
        ...


class ComputedStore:
    """Base of stores whose tensors are not byte ranges of files, or not all of them. A subclass has `tensors` and
    `read`."""

    tensors: Any

    def read(self, name: str, box: Box) -> torch.Tensor:
        raise NotImplementedError

    def view(self, name: str) -> torch.Tensor:
        """Return the whole tensor; callers never write to it."""
        return self.read(name, full(self.tensors[name].shape))

    def can_read_bytes(self, name: str) -> bool:
        return False

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        raise NotImplementedError(f"{name} is not a byte range of a file")


class Guard(Protocol):
    """Checks tensors of files while they are read."""

    def started(self, name: str) -> None:
        """Take note that a part of a tensor is about to be read; called again and again, by any thread."""
        ...

    def take_share(self, rank: int, ranks: int) -> None:
        """Check this reader's share of all tensors instead of those that it reads."""
        ...

    def part_bytes(self, name: str) -> int | None:
        """Return how many bytes each digest covers of which the expected one is made; None: nothing is expected."""
        ...

    def leave_to_reader(self, names: Iterable[str]) -> None:
        """Do not check tensors that the reader hashes himself, whose digests he hands to `compare`."""
        ...

    def compare(self, digests: Iterable[tuple[str, str]]) -> None:
        """Check the digests, by tensor name, of what was read."""
        ...

    def finish(self) -> None:
        """Wait for the checks and raise CheckpointError for what they found."""
        ...

    def close(self) -> None:
        """End the checks."""
        ...


class Closing:
    """Base of what is open in a with statement, and closed by `close` at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        raise NotImplementedError


class FileStore(Closing):
    """The tensors of safetensors files, opened when first needed, closed by `close` or a with statement.

    Several threads may read at the same time.
    """

    def __init__(self, paths: Mapping[str, Path], weight_map: Mapping[str, str] | None = None) -> None:
        """Read the headers of `paths` (file name -> path). weight_map: which file counts for a tensor (name -> file
        name), as an index says it: copies of the tensor in other files are passed over."""
        self._hold({file: read_header(path, file) for file, path in paths.items()}, weight_map)
        self.paths = dict(paths)
        self._fds: dict[str, int] = {}
        weakref.finalize(self, _close_all, self._fds)
        self._guard: Guard | None = None
        self._elements: Callable[[str, memoryview], None] | None = None
        self._opening = threading.Lock()

    def _hold(self, headers: Mapping[str, Header], weight_map: Mapping[str, str] | None) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.header_digests: dict[str, str] = {}
        self.file_of: dict[str, str] = {}
        self._data_start: dict[str, int] = {}
        for file, header in headers.items():
            self._data_start[file] = header.data_start
            self.metadata[file], self.header_digests[file] = header.metadata, header.sha256
            for name, info in header.tensors.items():
                counts = None if weight_map is None else weight_map.get(name)
                if counts in headers and counts != file:
                    continue
                if name in self.file_of:
                    raise CheckpointError(f"tensor {quote(name)} is in two files, {self.file_of[name]} and {file}")
                self.tensors[name], self.file_of[name] = info, file

    def state(self) -> dict[str, tuple[int, int, int]]:
        """Return each file's size and times of change (ns), by which a later run knows that it is the same file."""
        found = {file: path.stat() for file, path in sorted(self.paths.items())}
        return {file: (info.st_size, info.st_mtime_ns, info.st_ctime_ns) for file, info in found.items()}

    def close(self) -> None:
        """Close all files."""
        if self._guard is not None:
            self._guard.close()
        _close_all(self._fds)

    def _fd(self, file: str) -> int:
        with self._opening:
            if file not in self._fds:
                try:
                    self._fds[file] = os.open(self.paths[file], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                except OSError as error:
                    raise CheckpointError(f"{file} cannot be opened: {error.strerror}") from None
            return self._fds[file]

    def read(self, name: str, box: Box) -> torch.Tensor:
        info = self.tensors[name]
        dtype = torch_dtype(info.dtype)
        if bit_width(info.dtype) != 8 * dtype.itemsize:
            raise CheckpointError(f"tensor {name!r} has the packed dtype {info.dtype}, which can only be copied whole")
        return read_box(partial(self.read_into, name), info.shape, dtype, box)

    def view(self, name: str) -> torch.Tensor:
        """Return the whole tensor, read into memory: for small ones."""
        return self.read(name, full(self.tensors[name].shape))

    def can_read_bytes(self, name: str) -> bool:
        return True

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        if self._guard is not None:
            self._guard.started(name)
        self.read_unchecked(name, begin, buffer)
        if self._elements is not None:
            self._elements(name, buffer)

    def read_unchecked(self, name: str, begin: int, buffer: memoryview) -> None:
        """As `read_into`, without the checks."""
        info, file = self.tensors[name], self.file_of[name]
        position, done = self._data_start[file] + info.start + begin, 0
        while done < len(buffer):
            try:
                n = os.preadv(self._fd(file), [buffer[done:]], position + done)
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
            if n == 0:
                raise CheckpointError(f"{file} became shorter while it was read")
            done += n

    def guard(self, guard: Guard) -> None:
        """Have tensors checked from their first use on."""
        self._guard = guard

    def check_elements(self, check: Callable[[str, memoryview], None]) -> None:
        """Have `check` called with the name of a tensor and the bytes of it, whenever some have been read."""
        self._elements = check

    def take_share(self, rank: int, ranks: int) -> None:
        """Of a guarded store, check the tensors of one of several readers, instead of those that are read."""
        if self._guard is not None:
            self._guard.take_share(rank, ranks)

    def part_bytes(self, name: str) -> int | None:
        """Return how many bytes of a tensor each digest covers of which the one is made that it is checked against
        (`tensor_hash.part_bytes`); None where it is not checked."""
        return None if self._guard is None else self._guard.part_bytes(name)

    def check(self, names: Iterable[str]) -> None:
        """Of a guarded store, check tensors of which nothing is read now."""
        if self._guard is not None:
            for name in names:
                self._guard.started(name)

    def leave_to_reader(self, names: Iterable[str]) -> None:
        """Of a guarded store, do not hash tensors whose digests are handed to `compare_digests`."""
        if self._guard is not None:
            self._guard.leave_to_reader(names)

    def compare_digests(self, digests: Iterable[tuple[str, str]]) -> None:
        """Compare the SHA-256 of tensors, by name, as they were read; `finish_checks` raises what was found."""
        if self._guard is not None:
            self._guard.compare(digests)

    def finish_checks(self) -> None:
        """Wait until what was read is checked; raise what was found."""
        if self._guard is not None:
            self._guard.finish()


class FilesSeen(FileStore):
    """Tensors of files, of which some are seen otherwise than they lie there: those a subclass computes."""

    def __init__(
        self, files: FileStore, seen: Mapping[str, tuple[str, str, Shape]], hidden: Collection[str] | None = None
    ) -> None:
        """seen: name -> the file's tensor that it is made of, and its dtype and shape. hidden: tensors that are not
        seen; None: those that the others are made of."""
        self._files, self._seen = files, seen
        hidden = {source for source, _, _ in seen.values()} if hidden is None else hidden
        self.metadata, self.file_of = files.metadata, dict(files.file_of)
        self.tensors = {name: info for name, info in files.tensors.items() if name not in hidden}
        for name, (source, dtype, shape) in seen.items():
            self.tensors[name] = TensorInfo(dtype, shape, 0, byte_count(dtype, shape))
            self.file_of[name] = files.file_of[source]

    def close(self) -> None:
        self._files.close()

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self.compute(name, box) if name in self._seen else self._files.read(name, box)

    def compute(self, name: str, box: Box) -> torch.Tensor:
        """Return a region of a tensor of `seen`."""
        raise NotImplementedError

    def can_read_bytes(self, name: str) -> bool:
        return name not in self._seen and self._files.can_read_bytes(name)

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        self._files.read_into(name, begin, buffer)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a small safetensors file, read into memory, and the metadata of its header.

    Raises CheckpointError, one sentence, for a file that is damaged, missing, or becomes shorter meanwhile.
    """
    with FileStore({path.name: path}) as store:
        return {name: store.view(name) for name in store.tensors}, store.metadata[path.name]


def _close_all(fds: dict[str, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


class MemoryStore(ComputedStore):
    """Tensors in memory, on any device. Sharing storage is fine, writing to them meanwhile is not."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._values = {name: t.detach() for name, t in tensors.items()}
        self.tensors = {
            name: TensorInfo(dtype_name(t.dtype), tuple(t.shape), 0, t.numel() * t.element_size())
            for name, t in self._values.items()
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._values[name][slices(box)]

    def view(self, name: str) -> torch.Tensor:
        """Return the tensor itself; callers never write to it."""
        return self._values[name]


class JoinedStore:
    """Tensors of several stores as one."""

    def __init__(self, owners: Mapping[str, Store]) -> None:
        """owners: tensor name -> the store that has it."""
        self._owners = owners
        self.tensors = {name: store.tensors[name] for name, store in owners.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._owners[name].read(name, box)

    def can_read_bytes(self, name: str) -> bool:
        return self._owners[name].can_read_bytes(name)

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        self._owners[name].read_into(name, begin, buffer)
