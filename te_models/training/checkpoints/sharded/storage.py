"""The files of a sharded checkpoint, and reading them.

    parts/rank-00003.safetensors    what rank 3 wrote: boxes of whole tensors, each under "name@begin"
    parts/rank-00003.json           the digests of that file, which rank 3 took of what it wrote
    parts/index.safetensors         which box of which tensor is in which file (`index_file`)

torch's own storage for checkpoints writes pickles, whose reading runs code of whoever wrote them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

from torch import Tensor

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.boxes import Box as Ranges
from te_models.checkpoints.io.boxes import Range
from te_models.checkpoints.io.dtypes import dtype_name
from te_models.checkpoints.io.errors import quote
from te_models.checkpoints.io.store import FileStore
from te_models.checkpoints.io.weight_files import plain_file

from ....parallel.parts import Box, LocalPart
from ..checks import PARTS
from .index import CheckpointIndex, index_name
from .join import box_name

_MOST_ENTRIES, _MOST_FILES = 1_000_000, 200
"""Of headers that stay in memory while a model is read tensor by tensor, 300 MiB, and of files that stay open."""


class Read(NamedTuple):
    """A part of a box of a file, and where it goes. ranges: within the box, whose shape is `shape`."""

    name: str
    entry: str
    shape: tuple[int, ...]
    ranges: Ranges
    target: Tensor


def plan_reads(index: CheckpointIndex, parts: Mapping[str, LocalPart]) -> dict[int, list[Read]]:
    """Return what has to be read to fill parts, all of which the index has, by the number of the file."""
    meetings: dict[tuple[object, ...], list[int]] = {}
    tables: dict[int, tuple[list[list[int]], list[list[int]]]] = {}
    by_file: dict[int, list[Read]] = {}
    for name, part in parts.items():
        stored = index.tensors[name]
        cutting, files = stored.cutting, stored.files
        if id(cutting) not in tables:
            tables[id(cutting)] = cutting.begins.tolist(), cutting.sizes.tolist()
        begins, sizes = tables[id(cutting)]
        for box in part.boxes():
            key = id(cutting), box.begin, box.shape
            if key not in meetings:
                meetings[key] = cutting.meeting(box.begin, box.shape)
            for number in meetings[key]:
                read = _read(name, part, box, tuple(begins[number]), tuple(sizes[number]))
                by_file.setdefault(int(files[number]), []).append(read)
    return by_file


def _read(name: str, part: LocalPart, box: Box, begin: tuple[int, ...], size: tuple[int, ...]) -> Read:
    low = tuple(map(max, box.begin, begin))
    high = (min(b + n, c + m) for b, n, c, m in zip(box.begin, box.shape, begin, size, strict=True))
    shape = tuple(h - b for h, b in zip(high, low, strict=True))
    ranges = tuple(Range(b - c, b - c + n) for b, c, n in zip(low, begin, shape, strict=True))
    return Read(name, box_name(name, begin), size, ranges, part.view(box.within(low, shape)))


class PartReader:
    """Reads boxes of tensors of a folder of parts. index: of `read_parts_index`."""

    def __init__(self, folder: Path, index: CheckpointIndex) -> None:
        self.folder, self.index = folder, index
        self._stores: dict[int, FileStore] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._stores:
            self._stores.popitem()[1].close()

    def _store(self, number: int) -> FileStore:
        """Open a file; those whose headers were read last stay open."""
        store = self._stores.pop(number, None)
        if store is None:
            held = sum(len(store.tensors) for store in self._stores.values())
            while self._stores and (held > _MOST_ENTRIES or len(self._stores) >= _MOST_FILES):
                oldest = self._stores.pop(next(iter(self._stores)))
                held -= len(oldest.tensors)
                oldest.close()
            file = self.index.files[number]
            store = FileStore({file: plain_file(self.folder, file, index_name(self.folder))})
        self._stores[number] = store
        return store

    def fill(self, parts: Mapping[str, LocalPart]) -> None:
        """Read parts, all of which the index has; of the files only what they need is read. Raises CheckpointError."""
        for number, file_reads in sorted(plan_reads(self.index, parts).items()):
            store, file = self._store(number), f"{PARTS}/{self.index.files[number]}"
            for read in file_reads:
                info = store.tensors.get(read.entry)
                if info is None:
                    raise CheckpointError(f"{file} lacks {quote(read.entry)}")
                if info.shape != read.shape:
                    where, said = index_name(self.folder), list(read.shape)
                    raise CheckpointError(
                        f"{file} holds {quote(read.entry)} with shape {list(info.shape)}, and {where} says {said}"
                    )
                allowed = dtype_name(read.target.dtype)
                if info.dtype != allowed:
                    raise CheckpointError(
                        f"the checkpoint holds {quote(read.name)} as {info.dtype}; allowed: {allowed}"
                    )
                read.target.copy_(store.read(read.entry, read.ranges))
