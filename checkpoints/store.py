"""Where tensors come from: weight files on disk, or tensors in memory, behind one small interface.

A store gives the dtype and shape of every tensor without reading data, `read(name, box)` for strided or converting
access (a memory map for files: reading touches the page cache, not anonymous memory), and `read_into` for the common
case of a contiguous byte range, which goes straight from the file into the writer's buffer.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

import torch

from .boxes import Box, slices
from .dtypes import bits_of, dtype_name, torch_dtype
from .errors import CheckpointError, quote
from .header import TensorInfo, read_header


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
        """Whether `read_into` works: the tensor is a byte range of a file."""
        ...

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from byte `begin` on."""
        ...


class FileStore:
    """The tensors of safetensors files, opened when first needed, closed by `close` or a with statement.

    Several threads may read at the same time.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        """Read the headers of `paths` (file name -> path)."""
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.file_of: dict[str, str] = {}
        self._paths = dict(paths)
        self._data_start: dict[str, int] = {}
        self._fds: dict[str, int] = {}
        weakref.finalize(self, _close_all, self._fds)
        self._maps: dict[str, torch.Tensor] = {}
        self._opening = threading.Lock()
        for file, path in paths.items():
            header = read_header(path, file)
            self._data_start[file] = header.data_start
            self.metadata[file] = header.metadata
            for name, info in header.tensors.items():
                if name in self.file_of:
                    raise CheckpointError(f"tensor {quote(name)} is in two files, {self.file_of[name]} and {file}")
                self.tensors[name], self.file_of[name] = info, file

    def state(self) -> dict[str, tuple[int, int, int]]:
        """Return each file's size and times of change (ns), by which a later run knows that it is the same file."""
        found = {file: path.stat() for file, path in sorted(self._paths.items())}
        return {file: (info.st_size, info.st_mtime_ns, info.st_ctime_ns) for file, info in found.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; views handed out earlier stay valid."""
        self._maps.clear()
        _close_all(self._fds)

    def _fd(self, file: str) -> int:
        with self._opening:
            if file not in self._fds:
                self._fds[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
            return self._fds[file]

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self.view(name)[slices(box)]

    def view(self, name: str) -> torch.Tensor:
        """Return the tensor, a part of a memory map; callers read parts of it and never write."""
        info, file = self.tensors[name], self.file_of[name]
        if bits_of(info.dtype) != 8 * torch_dtype(info.dtype).itemsize:
            raise CheckpointError(f"tensor {name!r} has the packed dtype {info.dtype}, which can only be copied whole")
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        if file not in self._maps:
            # A private mapping: torch wants writable memory, and a write would stay in this process.
            mapping = mmap.mmap(self._fd(file), 0, access=mmap.ACCESS_COPY)
            self._maps[file] = torch.frombuffer(mapping, dtype=torch.uint8)
        begin = self._data_start[file] + info.start
        raw = self._maps[file][begin : begin + info.nbytes]
        dtype = torch_dtype(info.dtype)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()  # legal in the format, unusable as a typed view; our writer and the library's align data
        return raw.view(dtype).view(info.shape)

    def can_read_bytes(self, name: str) -> bool:
        return True

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        info, file = self.tensors[name], self.file_of[name]
        position, done = self._data_start[file] + info.start + begin, 0
        while done < len(buffer):
            n = os.preadv(self._fd(file), [buffer[done:]], position + done)
            if n == 0:
                raise CheckpointError(f"{file} became shorter while it was read")
            done += n


def _close_all(fds: dict[str, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


class MemoryStore:
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

    def can_read_bytes(self, name: str) -> bool:
        return False

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        raise NotImplementedError("tensors in memory have no byte ranges")


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
