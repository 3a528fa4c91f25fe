"""Checkpoints of `torch.distributed.checkpoint`, read without it: a `Store` of tensors that many ranks wrote.

    .metadata           a pickle: dtype and shape of every tensor, its chunks, and in which part of which file each is
    __0_0.distcp, ...   what a rank wrote: one `torch.save` file after the other

Megatron-Core's `torch_dist` and torchtitan's checkpoints are of this kind.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from te_models.lazy import torch

from ..io.boxes import Box, Range, Shape, extents, intersect, tiles
from ..io.dtypes import dtype_name, torch_dtype
from ..io.errors import CheckpointError, quote
from ..io.header import TensorInfo, byte_count
from ..io.store import Closing, ComputedStore
from ..io.weight_files import plain_file
from .plain_pickle import MOST_BYTES, Global, Record, read_plain
from .torch_file import DTYPES, TensorRef, TorchFile

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint."
_NAMES = frozenset(
    {
        *(f"torch.{dtype}" for dtype in DTYPES),
        *(f"{_DCP}metadata.", f"{_DCP}filesystem._StorageInfo", f"{_DCP}planner.", "torch.Size"),
        *("torch.serialization._get_layout", "torch.strided", "torch.contiguous_format", "torch.preserve_format"),
        *("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath", "collections.OrderedDict"),
        *("megatron.core.dist_checkpointing.", "builtins.set", "builtins.frozenset"),
    }
)
_MOST_OPEN = 64
_MOST_PARSED = 4096


class Chunk(NamedTuple):
    """A part of a tensor, and the part of a file where it is."""

    box: Box
    file: str
    begin: int
    length: int


class DCPStore(ComputedStore, Closing):
    """The tensors of a checkpoint, closed by `close` or a with statement. tensors: dtype and shape of each; values:
    the names of what is no tensor, such as numbers of steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        where = f"{folder.name}/{METADATA}"
        path = plain_file(folder, METADATA)
        if path.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{where} has {path.stat().st_size} bytes; allowed: {MOST_BYTES}")
        metadata = read_plain(path.read_bytes(), where, _NAMES)
        if not isinstance(metadata, Record) or metadata.kind != f"{_DCP}metadata.Metadata":
            raise CheckpointError(f"{where} does not hold a checkpoint's metadata")
        self.tensors: dict[str, TensorInfo] = {}
        self.values: set[str] = set()
        self._chunks: dict[str, list[Chunk]] = {}
        self._sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()}
        places = _places(metadata.get("storage_data"), where)
        entries = metadata.get("state_dict_metadata")
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if not isinstance(name, str) or not isinstance(entry, Record):
                raise CheckpointError(f"{where} has something other than names of tensors")
            if entry.kind.endswith(".TensorStorageMetadata"):
                self._add(name, entry, places, where)
            else:
                self.values.add(name)
        self._covered: set[str] = set()
        self._fds: dict[str, int] = {}
        self._files: dict[Chunk, TorchFile] = {}

    def _add(
        self, name: str, entry: Record, places: Mapping[tuple[str, Shape], tuple[str, int, int]], where: str
    ) -> None:
        named = f"{quote(name)} in {where}"
        properties, shape, chunks = entry.get("properties"), _shape(entry.get("size"), named), entry.get("chunks")
        state = properties.state if isinstance(properties, Record) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, Global) or dtype.name.removeprefix("torch.") not in DTYPES:
            raise CheckpointError(f"{named} has no dtype that tensors have")
        kind = dtype_name(getattr(torch, dtype.name.removeprefix("torch.")))
        self.tensors[name] = TensorInfo(kind, shape, 0, byte_count(kind, shape))
        found: dict[Shape, Chunk] = {}
        for chunk in chunks if isinstance(chunks, list) else ():
            if not isinstance(chunk, Record):
                raise CheckpointError(f"{named} has a chunk that is none")
            begin, size = _shape(chunk.get("offsets"), named), _shape(chunk.get("sizes"), named)
            if not len(begin) == len(size) == len(shape) or (name, begin) not in places:
                raise CheckpointError(f"{named} has a chunk at {list(begin)} that is in no file")
            file, at, length = places[name, begin]
            if at + length > self._sizes.get(file, -1):
                raise CheckpointError(f"{where} says that {quote(file)} has more bytes than there are")
            box = tuple(Range(b, b + n) for b, n in zip(begin, size, strict=True))
            if 0 not in size or not size:
                found[begin] = Chunk(box, file, at, length)
        self._chunks[name] = list(found.values())

    def close(self) -> None:
        """Close all files."""
        self._files.clear()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def read(self, name: str, box: Box) -> torch.Tensor:
        info = self.tensors[name]
        if name not in self._covered:
            if not tiles([chunk.box for chunk in self._chunks[name]], info.shape):
                raise CheckpointError(
                    f"the chunks of {quote(name)} do not cover each element of {list(info.shape)} once"
                )
            self._covered.add(name)
        if any(r.step != 1 for r in box):
            around = tuple(Range(r.start, max(r.stop - r.step + 1, r.start)) for r in box)
            return self.read(name, around)[tuple(slice(None, None, r.step) for r in box)]
        out: torch.Tensor | None = None
        for chunk in self._chunks[name]:
            inner = intersect(chunk.box, box)
            if inner is None:
                continue
            part = self._read(
                name, chunk, tuple(Range(r.start - c.start, r.stop - c.start) for r, c in zip(inner, chunk.box))
            )
            if inner == box:
                return part
            if out is None:
                out = torch.empty(extents(box), dtype=part.dtype, device="cpu")
            out[tuple(slice(r.start - b.start, r.stop - b.start) for r, b in zip(inner, box))] = part
        if out is None:
            return torch.empty(extents(box), dtype=torch_dtype(info.dtype), device="cpu")
        return out

    def _read(self, name: str, chunk: Chunk, box: Box) -> torch.Tensor:
        file = self._open(chunk)
        tensor = file.value
        if not isinstance(tensor, TensorRef):
            raise CheckpointError(f"{chunk.file} holds something other than a tensor for {quote(name)}")
        if tensor.shape != extents(chunk.box) or dtype_name(getattr(torch, tensor.dtype)) != self.tensors[name].dtype:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(f"{chunk.file} holds {quote(name)} as {found}, and {METADATA} says something else")
        return file.read(tensor, box)

    def _open(self, chunk: Chunk) -> TorchFile:
        if chunk in self._files:
            return self._files[chunk]
        if chunk.file not in self._fds:
            if len(self._fds) >= _MOST_OPEN:
                self.close()
            path = plain_file(self.folder, chunk.file, METADATA)
            self._fds[chunk.file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if len(self._files) >= _MOST_PARSED:
            self._files.clear()
        where = f"{chunk.file} at byte {chunk.begin}"
        self._files[chunk] = TorchFile(self._fds[chunk.file], chunk.begin, chunk.length, where)
        return self._files[chunk]


def _shape(value: Any, where: str) -> Shape:
    if (
        not isinstance(value, tuple)
        or len(value) > 16
        or any(type(n) is not int or not 0 <= n < 1 << 60 for n in value)
    ):
        raise CheckpointError(f"{where} has a shape or an offset that is none")
    return value


def _places(data: Any, where: str) -> dict[tuple[str, Shape], tuple[str, int, int]]:
    """Return of each chunk, by the name of its tensor and its offset, file, first byte and length."""
    found: dict[tuple[str, Shape], tuple[str, int, int]] = {}
    for index, info in data.items() if isinstance(data, dict) else ():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise CheckpointError(f"{where} does not say where its chunks are")
        name, offset = index.get("fqn"), index.get("offset")
        file, at, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        if info.get("transform_descriptors"):
            raise CheckpointError(f"{where} says that chunks are transformed, compressed perhaps; allowed: plain ones")
        valid = isinstance(name, str) and isinstance(file, str) and all(type(n) is int and n >= 0 for n in (at, length))
        if not valid:
            raise CheckpointError(f"{where} does not say where its chunks are")
        if offset is not None:
            found[name, _shape(offset, where)] = file, at, length
    return found
