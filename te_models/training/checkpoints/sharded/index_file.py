"""parts/index.safetensors, read with no trust in its content: an `CheckpointIndex` as a few flat arrays of numbers.

    names       U8 [bytes]              of T tensors, UTF-8, with a newline between them
    dtypes      U8 [T]                  number of the dtype in the list that the metadata has
    cuttings    I32 [T]                 how the tensor is cut: number of one of C cuttings
    dimensions  I32 [C], boxes I64 [C]  of each cutting
    shapes      I64 [sum of dimensions]
    bounds      I64 [sum of boxes x 2 x dimensions]     begin and size of each box
    files       I32 [sum over tensors of their boxes]   number of the file, rank-NUMBER.safetensors

The metadata has the number of ranks and the list of dtypes. Tensors that are cut alike share a cutting, so that a box
takes four bytes, and its file's header names each box in far more: a larger index than its files is not one.
"""

import ctypes
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.dtypes import bit_width, dtype_name, torch_dtype
from te_models.checkpoints.io.errors import quote
from te_models.checkpoints.io.hashing import FileRecord
from te_models.checkpoints.io.store import read_tensors
from te_models.checkpoints.io.weight_files import plain_file
from te_models.checkpoints.write.writer import write_tensors

from ..checks import PARTS
from .index import INDEX, MOST, MOST_DIMENSIONS, CheckpointIndex, Cutting, IndexedTensor, file_of

_WHERE = f"{PARTS}/{INDEX}"
_ARRAYS = {
    "names": torch.uint8,
    "dtypes": torch.uint8,
    "cuttings": torch.int32,
    "dimensions": torch.int32,
    "boxes": torch.int64,
    "shapes": torch.int64,
    "bounds": torch.int64,
    "files": torch.int32,
}
_LEAST_LIMIT = 1 << 20
"""Bytes that an index may have however small its files are."""
_MOST_NAME = 1024


def write_file(folder: Path, index: CheckpointIndex) -> FileRecord:
    """Write the index of a folder of parts, whose files are the ranks'; return its digests."""
    numbers: dict[int, int] = {}
    cuttings: list[Cutting] = []
    for stored in index.tensors.values():
        if numbers.setdefault(id(stored.cutting), len(cuttings)) == len(cuttings):
            cuttings.append(stored.cutting)
    dtypes = {dtype: n for n, dtype in enumerate(dict.fromkeys(s.dtype for s in index.tensors.values()))}
    tensors = index.tensors.values()
    arrays = {
        "names": torch.frombuffer(bytearray("\n".join(index.tensors).encode()), dtype=torch.uint8),
        "dtypes": torch.tensor([dtypes[s.dtype] for s in tensors], dtype=torch.uint8, device="cpu"),
        "cuttings": torch.tensor([numbers[id(s.cutting)] for s in tensors], dtype=torch.int32, device="cpu"),
        "dimensions": torch.tensor([len(c.shape) for c in cuttings], dtype=torch.int32, device="cpu"),
        "boxes": torch.tensor([len(c.begins) for c in cuttings], dtype=torch.int64, device="cpu"),
        "shapes": torch.tensor([n for c in cuttings for n in c.shape], dtype=torch.int64, device="cpu"),
        "bounds": _joined((torch.stack([c.begins, c.sizes], 1) for c in cuttings), torch.int64),
        "files": _joined((s.files for s in tensors), torch.int32),
    }
    metadata = {"ranks": str(len(index.files)), "dtypes": ",".join(map(dtype_name, dtypes))}
    return write_tensors(folder / INDEX, arrays, metadata)


def _joined(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype, device="cpu"), *(part.reshape(-1).to(dtype) for part in parts)])


def read_file(folder: Path) -> CheckpointIndex:
    """Return what index.safetensors says, all of it checked. Raises CheckpointError."""
    path = plain_file(folder, INDEX)
    limit = _LEAST_LIMIT + sum(file.stat().st_size for file in folder.iterdir() if file.name != INDEX)
    if path.stat().st_size > limit:
        raise CheckpointError(f"{_WHERE} has {path.stat().st_size} bytes; allowed, beside these files: {limit}")
    arrays, metadata = read_tensors(path)
    if {name: value.dtype for name, value in arrays.items()} != _ARRAYS or any(a.dim() != 1 for a in arrays.values()):
        raise CheckpointError(f"{_WHERE} does not hold exactly the arrays {', '.join(_ARRAYS)}")
    ranks, dtypes = metadata.get("ranks", ""), metadata.get("dtypes", "").split(",")
    if not (ranks.isascii() and ranks.isdigit() and len(ranks) < 8):
        raise CheckpointError(f"{_WHERE} has ranks {quote(ranks)}; allowed: a number below 10^7")
    if any(bit_width(dtype) not in (8, 16, 32, 64) for dtype in dtypes if dtype):
        raise CheckpointError(f"{_WHERE} has dtypes {quote(','.join(dtypes))}; allowed: dtypes of whole bytes")
    names = _names(arrays["names"])
    cuttings = _cuttings(arrays)
    kinds, chosen = (
        _numbers(arrays, "dtypes", len(dtypes), len(names)),
        _numbers(arrays, "cuttings", len(cuttings), len(names)),
    )
    counts = [len(cuttings[number].begins) for number in chosen]
    if sum(counts) != len(arrays["files"]):
        raise CheckpointError(f"{_WHERE} has files of {len(arrays['files'])} boxes, and there are {sum(counts)}")
    _numbers(arrays, "files", int(ranks), sum(counts))
    parts = arrays["files"].split(counts)
    types = [torch_dtype(dtype) if dtype else torch.uint8 for dtype in dtypes]
    rows = zip(names, kinds, chosen, parts, strict=True)
    tensors = {name: IndexedTensor(types[kind], cuttings[number], files) for name, kind, number, files in rows}
    index = CheckpointIndex(tensors, tuple(file_of(rank) for rank in range(int(ranks))))
    index.check(folder, _WHERE)
    return index


def _names(data: Tensor) -> list[str]:
    try:
        text = ctypes.string_at(data.data_ptr(), data.numel()).decode() if data.numel() else ""
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the names in {_WHERE} are not UTF-8 text (byte {error.start})") from None
    names = text.split("\n") if text else []
    for name in names:
        if not 0 < len(name) <= _MOST_NAME or not name.isprintable():
            raise CheckpointError(f"{_WHERE} has the unusable name {quote(name)}")
    if len(set(names)) < len(names):
        raise CheckpointError(f"{_WHERE} has a name twice")
    return names


def _numbers(arrays: dict[str, Tensor], key: str, most: int, count: int) -> list[int]:
    """Return an array of `count` numbers below `most` as a list; of the files it is only checked."""
    values = arrays[key]
    if len(values) != count or (count and not 0 <= int(values.min()) <= int(values.max()) < most):
        raise CheckpointError(f"{_WHERE} has {key} other than {count} numbers below {most}")
    return [] if key == "files" else values.tolist()


def _cuttings(arrays: dict[str, Tensor]) -> list[Cutting]:
    dimensions, boxes = arrays["dimensions"].tolist(), arrays["boxes"].tolist()
    if len(dimensions) != len(boxes) or any(not 0 <= d <= MOST_DIMENSIONS for d in dimensions):
        raise CheckpointError(f"{_WHERE} has dimensions other than numbers up to {MOST_DIMENSIONS}, one a cutting")
    sizes = [2 * d * n for d, n in zip(dimensions, boxes, strict=True)]
    shapes, bounds = arrays["shapes"], arrays["bounds"]
    if min(boxes, default=0) < 0 or sum(dimensions) != len(shapes) or sum(sizes) != len(bounds):
        raise CheckpointError(f"{_WHERE} has other numbers of shapes and bounds than its boxes have")
    if any(d == 0 and n != 1 for d, n in zip(dimensions, boxes, strict=True)):
        raise CheckpointError(f"{_WHERE} has other boxes of a number than one")
    for values in (shapes, bounds):
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < MOST // 2:
            raise CheckpointError(f"{_WHERE} has a shape or a box beyond 2^61")
    found = []
    for shape, pairs, d, n in zip(shapes.split(dimensions), bounds.split(sizes), dimensions, boxes, strict=True):
        whole, both = tuple(shape.tolist()), pairs.view(n, 2, d)
        if math.prod(max(size, 1) for size in whole) > MOST:
            raise CheckpointError(f"{_WHERE} has the shape {list(whole)}; allowed: at most 2^62 elements")
        found.append(Cutting(whole, both[:, 0], both[:, 1]))
    return found
