"""Where the tensors of a sharded checkpoint are: parts/index.json, read with no trust in its content.

    {"tensors": {"model.embedding.weight": {"dtype": "F32", "shape": [257, 64], "boxes": [
        {"begin": [0, 0], "shape": [129, 64], "file": "rank-00000.safetensors"}, ...]}}}

Checked here, before a file is opened or memory is asked for: the boxes of a tensor cover each of its elements exactly
once, files are plain ones inside the folder, and no file is too small for the boxes that it is said to hold. So a
reader that follows the index leaves no element of a tensor unwritten, and asks for no more memory than there are bytes
in the files. That a box is stored with this shape and dtype is checked by whoever reads it (`storage.PartReader`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.boxes import Range, tiles
from te_models.checkpoints.io.dtypes import bits_of, torch_dtype
from te_models.checkpoints.io.errors import quote, shown
from te_models.checkpoints.io.strict_json import read_object
from te_models.checkpoints.io.weight_files import plain_file

from ..checks import PARTS

INDEX = "index.json"
_WHERE = f"{PARTS}/{INDEX}"
_KINDS = ("model.", "optimizer.", "lora.", "rng.", "recipe.")
_MOST_DIMENSIONS = 8
_MOST = 1 << 62
"""Elements of a tensor: torch counts them in 64 bits."""


class StoredBox(NamedTuple):
    """A box in a file: its shape there, and the file's name in the folder of the parts."""

    shape: tuple[int, ...]
    file: str


def read_index(folder: Path) -> Metadata:
    """Return what index.json says as DCP's metadata, whose `storage_data` maps boxes to `StoredBox`.

    Raises CheckpointError, one sentence, for an index that does not say where every element of every tensor is.
    """
    values = read_object(plain_file(folder, INDEX), _WHERE)
    tensors: dict[str, Any] = {}
    boxes: dict[MetadataIndex, StoredBox] = {}
    for name, entry in _only(values, ("tensors",), _WHERE, dict)["tensors"].items():
        where = f"{quote(name)} in {_WHERE}"
        entry = _only(entry, ("dtype", "shape", "boxes"), where)
        dtype, shape = entry["dtype"], _sizes(entry["shape"], "shape", where)
        if not isinstance(dtype, str) or bits_of(dtype) not in (8, 16, 32, 64):
            raise CheckpointError(f"{where} has dtype {shown(dtype)}; allowed: a dtype of safetensors of whole bytes")
        if not isinstance(entry["boxes"], list):
            raise CheckpointError(f"{where} has boxes {shown(entry['boxes'])}; allowed: a list")
        chunks = []
        for box in entry["boxes"]:
            box = _only(box, ("begin", "shape", "file"), f"a box of {where}")
            begin, size = (_sizes(box[key], key, f"a box of {where}") for key in ("begin", "shape"))
            if not isinstance(box["file"], str):
                raise CheckpointError(f"a box of {where} has file {shown(box['file'])}; allowed: a name")
            if not len(begin) == len(size) == len(shape):
                raise CheckpointError(f"a box of {where} has other dimensions than its shape {list(shape)}")
            boxes[MetadataIndex(name, begin)] = StoredBox(size, box["file"])
            chunks.append(ChunkStorageMetadata(torch.Size(begin), torch.Size(size)))
        covered = [_ranges(chunk) for chunk in chunks]
        if len({chunk.offsets for chunk in chunks}) < len(chunks) or not tiles(covered, shape):
            raise CheckpointError(f"the boxes of {where} do not cover each element of its shape {list(shape)} once")
        tensors[name] = TensorStorageMetadata(TensorProperties(torch_dtype(dtype)), torch.Size(shape), chunks)
    _check_files(folder, tensors, boxes)
    return Metadata(tensors, storage_data=boxes)


def _ranges(chunk: ChunkStorageMetadata) -> tuple[Range, ...]:
    return tuple(Range(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _only(values: object, keys: tuple[str, ...], where: str, kind: type = object) -> dict[str, Any]:
    """Return an object with exactly these keys, whose values are of `kind`."""
    named = isinstance(values, dict) and values.keys() == {*keys}
    if not isinstance(values, dict) or not named or not all(isinstance(value, kind) for value in values.values()):
        raise CheckpointError(f"{where} is not an object of exactly {', '.join(keys)}")
    return values


def _sizes(values: object, key: str, where: str) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS or any(type(v) is not int for v in values):
        raise CheckpointError(f"{where} has {key} {shown(values)}; allowed: at most {_MOST_DIMENSIONS} integers")
    if min(values, default=0) < 0 or math.prod(max(v, 1) for v in values) > _MOST:
        raise CheckpointError(f"{where} has {key} {shown(values)}; allowed: numbers from 0, of at most 2^62 elements")
    return tuple(values)


def _check_files(folder: Path, tensors: Mapping[str, Any], boxes: Mapping[MetadataIndex, StoredBox]) -> None:
    """Check that the files are there and, as far as can be known from their sizes, hold the boxes."""
    needed: Counter[str] = Counter()
    for index, box in boxes.items():
        needed[box.file] += math.prod(box.shape) * tensors[index.fqn].properties.dtype.itemsize
    for file, nbytes in needed.items():
        size = plain_file(folder, file, _WHERE).stat().st_size
        if nbytes > size:
            raise CheckpointError(f"{_WHERE} says that {file} holds {nbytes} bytes of tensors, and it has {size} bytes")


def check_names(metadata: Metadata, ranks: int) -> None:
    """Check what can be without the model: what kinds of tensors there are, and for each of the ranks the states of its
    generators. Raises CheckpointError."""
    names = metadata.state_dict_metadata.keys()
    for name in names:
        kind, _, rest = name.partition(".")
        if not name.startswith(_KINDS):
            raise CheckpointError(f"{_WHERE} has {quote(name)}, which is no part of a training state")
        rank = rest.partition(".")[0]
        if kind in ("rng", "recipe") and rank not in map(str, range(min(ranks, len(names)))):
            raise CheckpointError(f"{_WHERE} has {quote(name)}, and the run had {ranks} ranks")
    for rank in range(ranks):
        for generator in ("python", "torch"):
            if f"rng.{rank}.{generator}" not in names:
                raise CheckpointError(f"{_WHERE} lacks 'rng.{rank}.{generator}'")
