"""Files that `torch.save` wrote, or parts of files that it wrote there: their values and tensors, without unpickling.

Such a file is a zip archive of uncompressed members: `data.pkl` with what there is, and the bytes of each storage,
`data/0` and so on. Tensors are found by the former (`plain_pickle`) and read from the latter by position, so that of a
large file only what is asked for passes through memory.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from te_models.lazy import torch

from ..io.box_reads import read_box
from ..io.boxes import Box, Shape, full, slices
from ..io.dtypes import dtype_name
from ..io.errors import CheckpointError, quote
from ..io.weight_files import plain_file
from .plain_pickle import Global, Record, read_plain

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"),
    *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
)
STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
}
_REBUILD = "torch._utils._rebuild_"
NAMES = frozenset(
    {
        *(f"torch.{dtype}" for dtype in DTYPES),
        *(f"torch.{kind}Storage" for kind in STORAGES),
        *(f"{_REBUILD}{kind}" for kind in ("tensor_v2", "tensor_v3", "parameter")),
        *("torch.storage.UntypedStorage", "torch.Size", "torch.device", "collections.OrderedDict"),
    }
)
"""What a file of tensors names."""

_MOST_MEMBERS = 1_000_000
_MOST_DIMENSIONS = 16


class StorageRef(NamedTuple):
    """A storage of a file. dtype: of its elements; None where each tensor says it."""

    dtype: str | None
    key: str


@dataclass(frozen=True)
class TensorRef:
    """A tensor of a file: its dtype's name, its shape, and where it is in a storage, in elements."""

    storage: str
    dtype: str
    shape: Shape
    offset: int
    strides: Shape

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, fd: int, begin: int, length: int) -> None:
        self._fd, self._begin, self._length, self._at = fd, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, (0, self._at, self._length)[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._at)]
        count = os.preadv(self._fd, [view], self._begin + self._at) if len(view) else 0
        self._at += count
        return count


def open_torch_file(path: Path, where: str, known: frozenset[str]) -> tuple[int, TorchFile]:
    """Return the descriptor of a file that torch.save wrote, for the caller to close, and what the file holds. where:
    names it in errors."""
    file = plain_file(path.parent, path.name)
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return fd, TorchFile(fd, 0, file.stat().st_size, where, known)
    except BaseException:
        os.close(fd)
        raise


class TorchFile:
    """What a file of `torch.save` holds. value: what it says, with a `TensorRef` for each tensor.

    fd: of the file, open; it stays so. begin, length: which part of it. known: names that its pickle may contain beside
    names of tensors.
    """

    def __init__(self, fd: int, begin: int, length: int, where: str, known: frozenset[str] = frozenset()) -> None:
        self._fd, self.where = fd, where
        self._places: dict[str, tuple[int, int]] = {}
        try:
            with zipfile.ZipFile(io.BufferedReader(_Window(fd, begin, length))) as archive:
                pickled = self._members(archive, begin, length)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{where} is not as torch.save writes a file: {str(error)[:100]}") from None
        self.value = with_tensors(read_plain(pickled, where, NAMES | known, self._storage), where)

    def _members(self, archive: zipfile.ZipFile, begin: int, length: int) -> bytes:
        """Note where the storages are; return the pickle."""
        members = archive.infolist()
        if len(members) > _MOST_MEMBERS:
            raise CheckpointError(f"{self.where} has {len(members)} members; allowed: {_MOST_MEMBERS}")
        pickled, order = b"", b"little"
        for member in members:
            _, _, name = member.filename.partition("/")
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise CheckpointError(f"{self.where} has the member {quote(member.filename)}, which is compressed")
            if name.startswith("data/"):
                at = self._data_of(member, begin)
                if at + member.file_size > begin + length:
                    raise CheckpointError(f"{self.where} is truncated")
                self._places[name.removeprefix("data/")] = at, member.file_size
            elif name == "data.pkl":
                pickled = archive.read(member)
            elif name == "byteorder":
                order = archive.read(member)
        if order != b"little":
            raise CheckpointError(f"{self.where} has byte order {quote(order.decode('latin-1'))}; allowed: little")
        return pickled

    def _data_of(self, member: zipfile.ZipInfo, begin: int) -> int:
        """Return where the bytes of a member begin: its own header says how long that is."""
        head = os.pread(self._fd, 30, begin + member.header_offset)
        if len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{self.where} has no member where its directory says one")
        name, extra = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
        return begin + member.header_offset + 30 + name + extra

    def _storage(self, reference: Any) -> StorageRef:
        if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
            raise ValueError("it refers to something that is no storage")
        kind, key = reference[1], reference[2]
        if not isinstance(kind, Global) or not isinstance(key, str) or key not in self._places:
            raise ValueError("it refers to a storage that the file does not have")
        return StorageRef(STORAGES.get(kind.name.removeprefix("torch.").removesuffix("Storage")), key)

    def read(self, tensor: TensorRef, box: Box | None = None) -> torch.Tensor:
        """Return a region of a tensor. Raises CheckpointError where its storage is too small for it."""
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        box = full(tensor.shape) if box is None else box
        at, size = self._places[tensor.storage]
        spans = [stride * (n - 1) for n, stride in zip(tensor.shape, tensor.strides, strict=True)]
        last = tensor.offset + sum(spans) + 1 if math.prod(tensor.shape) else 0
        if last * dtype.itemsize > size:
            raise CheckpointError(f"{self.where} has a tensor of {last} elements in a storage of {size} bytes")
        if tensor.is_contiguous:
            begin = at + tensor.offset * dtype.itemsize
            return read_box(partial(self._read_into, begin), tensor.shape, dtype, box)
        storage = torch.empty(size // dtype.itemsize, dtype=dtype, device="cpu")
        whole = read_box(partial(self._read_into, at), tuple(storage.shape), dtype, full(storage.shape))
        return whole.as_strided(tensor.shape, tensor.strides, tensor.offset)[slices(box)]

    def _read_into(self, base: int, begin: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], base + begin + done)
            if count == 0:
                raise CheckpointError(f"{self.where} became shorter while it was read")
            done += count


def with_tensors(value: Any, where: str) -> Any:
    """Return what a pickle says with a `TensorRef` in place of each call that makes a tensor. Containers that occur
    twice are looked through once."""
    done: dict[int, Any] = {}

    def replaced(item: Any) -> Any:
        if isinstance(item, Record) and item.kind.startswith(_REBUILD):
            return _tensor(item, where)
        if not isinstance(item, dict | list | tuple | Record):
            return item
        if id(item) in done:
            return done[id(item)][1]
        done[id(item)] = item, item
        if isinstance(item, dict):
            item.update({key: replaced(inner) for key, inner in item.items()})
        elif isinstance(item, list):
            item[:] = map(replaced, item)
        elif isinstance(item, tuple):
            done[id(item)] = item, tuple(map(replaced, item))
        else:
            item.arguments, item.state = replaced(item.arguments), replaced(item.state)
        return done[id(item)][1]

    try:
        return replaced(value)
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply to be a checkpoint") from None


def _tensor(record: Record, where: str) -> TensorRef:
    arguments = record.arguments
    if record.kind.endswith("parameter"):
        inner = arguments[0] if arguments else None
        if isinstance(inner, Record) and not inner.kind.endswith("parameter"):
            return _tensor(inner, where)
        arguments = ()
    storage, offset, shape, strides, *rest = arguments if len(arguments) >= 6 else (None, 0, (), ())
    dtype = storage.dtype if isinstance(storage, StorageRef) else None
    if record.kind.endswith("v3") and len(rest) == 3 and isinstance(rest[2], Global):
        dtype = rest[2].name.removeprefix("torch.")
    valid = dtype in DTYPES and all(isinstance(v, tuple) and len(v) <= _MOST_DIMENSIONS for v in (shape, strides))
    if not valid or len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in (offset, *shape, *strides)):
        raise CheckpointError(f"{where} has a tensor that is not as torch.save writes one")
    if math.prod(max(n, 1) for n in (*shape, *strides, offset)) >= 1 << 200:
        raise CheckpointError(f"{where} has a tensor that is larger than any file")
    assert isinstance(storage, StorageRef) and dtype is not None
    dtype_name(getattr(torch, dtype))
    return TensorRef(storage.key, dtype, tuple(shape), offset, tuple(strides))
