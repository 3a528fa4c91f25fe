"""Write a file that `torch.load(..., weights_only=True)` reads, as a stream: a tensor's rows at a time.

The file is a zip archive of uncompressed members, as `torch.save` writes it: `data.pkl` with what there is, and the
bytes of each tensor, `data/0` and so on, at places that are multiples of 64 bytes.
"""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from ..io.dtypes import torch_dtype
from ..io.header import byte_count
from .torch_file import STORAGES
from .written import Written

_ALIGNED = 64
_ZIP64 = 20
"""Bytes that a member of more than 2 GiB has in its header besides."""
_KINDS = {dtype: getattr(torch, f"{kind}Storage") for kind, dtype in STORAGES.items()}


class _Storage(NamedTuple):
    key: str
    output: Written


class _Tensor(NamedTuple):
    storage: _Storage


class _Pickler(pickle.Pickler):
    """Says of tensors what torch would say, and has none."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        dtype = str(torch_dtype(value.output.dtype)).removeprefix("torch.")
        size = byte_count(value.output.dtype, value.output.shape)
        if dtype not in _KINDS:
            return "storage", torch.UntypedStorage, value.key, "cpu", size
        return "storage", _KINDS[dtype], value.key, "cpu", size // torch_dtype(value.output.dtype).itemsize

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Tensor):
            return NotImplemented
        shape = value.storage.output.shape
        strides = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
        arguments = value.storage, 0, tuple(shape), tuple(strides), False, OrderedDict()
        dtype = torch_dtype(value.storage.output.dtype)
        if str(dtype).removeprefix("torch.") in _KINDS:
            return _rebuild_tensor_v2, arguments
        return _rebuild_tensor_v3, (*arguments, dtype)


def write_torch_file(
    path: Path, values: dict[str, Any], outputs: Sequence[Written], key: str | None = None, *, stem: str | None = None
) -> None:
    """Write a file that holds `values`, plain ones, and tensors by name: among them, or below `key`. stem: what the
    archive calls itself; None: as the file is called."""
    stem = stem or path.stem
    tensors = {output.name: _Tensor(_Storage(str(number), output)) for number, output in enumerate(outputs)}
    described = io.BytesIO()
    _Pickler(described, protocol=2).dump({**values, **tensors} if key is None else {**values, key: tensors})
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, data in (("data.pkl", described.getvalue()), ("byteorder", b"little")):
                _add(archive, stem, name, len(data), iter([data]))
            for number, output in enumerate(outputs):
                size = byte_count(output.dtype, output.shape)
                _add(archive, stem, f"data/{number}", size, _parts(output))
            _add(archive, stem, "version", 2, iter([b"3\n"]))
        file.flush()
        os.fsync(file.fileno())


def _parts(output: Written) -> Iterator[Any]:
    for begin, end in output.spans():
        part = output.rows(begin, end).contiguous()
        yield part.view(-1).view(torch.uint8).numpy().data if part.numel() else b""


def _add(archive: zipfile.ZipFile, folder: str, name: str, size: int, parts: Iterator[Any]) -> None:
    member = zipfile.ZipInfo(f"{folder}/{name}")
    member.file_size = size
    large = size * 1.05 > zipfile.ZIP64_LIMIT
    assert archive.fp is not None, "the archive is open"
    begin = archive.fp.tell() + 30 + len(member.filename) + 4 + (_ZIP64 if large else 0)
    filled = -begin % _ALIGNED
    member.extra = b"FB" + filled.to_bytes(2, "little") + bytes(filled)
    with archive.open(member, "w", force_zip64=large) as file:
        for part in parts:
            file.write(part)
