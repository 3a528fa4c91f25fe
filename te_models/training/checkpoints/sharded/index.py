"""Where the tensors of a sharded checkpoint are: which box of which tensor is in which file.

`CheckpointIndex` is what the writer joins, what a file says (`index_file`; `old_index` of earlier releases), and what
readers follow. Checked before a file of tensors is opened or memory is asked for: the boxes of a tensor cover each of
its elements exactly once, and no file is too small for the boxes that it is said to hold. So a reader that follows the
index leaves no element of a tensor unwritten, and asks for no more memory than there are bytes in the files. That a box
is stored with this shape and dtype is checked by whoever reads it (`storage`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.boxes import Range, tiles
from te_models.checkpoints.io.errors import quote
from te_models.checkpoints.io.weight_files import plain_file

from ..checks import PARTS
from ..files import INDEX

OLD_INDEX = "index.json"
KINDS = ("model.", "optimizer.", "lora.", "rng.", "recipe.", "replica.", "outer.")
MOST_DIMENSIONS = 8
MOST = 1 << 62
"""Elements of a tensor: torch counts them in 64 bits."""


@dataclass(frozen=True, eq=False)
class Cutting:
    """How a tensor is cut into boxes. shape: of the whole one; begins, sizes: of each box, int64 [boxes, dimensions].
    Many tensors of a model are cut alike, and share one of these."""

    shape: tuple[int, ...]
    begins: Tensor
    sizes: Tensor

    @cached_property
    def elements(self) -> Tensor:
        """Elements of each box, float64: exact below 2^53, and never wrapped around above."""
        return self.sizes.double().prod(1)

    def covers_once(self) -> bool:
        """Whether the boxes cover each element of the shape exactly once."""
        pairs = list(zip(self.begins.tolist(), self.sizes.tolist(), strict=True))
        if len({tuple(begin) for begin, _ in pairs}) < len(pairs):
            return False
        boxes = [tuple(Range(b, b + n) for b, n in zip(begin, size, strict=True)) for begin, size in pairs]
        return tiles(boxes, self.shape)

    def meeting(self, begin: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
        """Return the numbers of the boxes that have elements in common with one."""
        first, size = (torch.tensor(values, dtype=torch.int64, device="cpu").view(1, -1) for values in (begin, shape))
        meets = (self.begins < first + size) & (self.begins + self.sizes > first)
        return meets.all(1).nonzero().view(-1).tolist()


class IndexedTensor(NamedTuple):
    """A tensor of a checkpoint. files: of each box of the cutting, the number of its file, int32."""

    dtype: torch.dtype
    cutting: Cutting
    files: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cutting.shape


@dataclass(frozen=True, eq=False)
class CheckpointIndex:
    """What a checkpoint holds, by name. files: the names of the files in its folder `parts`, by number."""

    tensors: dict[str, IndexedTensor]
    files: tuple[str, ...]

    def check(self, folder: Path, where: str) -> None:
        """Check that every tensor is covered, and that the files are there and, as far as can be known from their
        sizes, hold the boxes. Raises CheckpointError."""
        covered: dict[int, bool] = {}
        needed = torch.zeros(len(self.files), dtype=torch.float64, device="cpu")
        for name, stored in self.tensors.items():
            cutting = stored.cutting
            if id(cutting) not in covered:
                covered[id(cutting)] = cutting.covers_once()
            if not covered[id(cutting)]:
                raise CheckpointError(
                    f"the boxes of {quote(name)} in {where} do not cover each element of its shape "
                    f"{list(stored.shape)} once"
                )
            needed.index_add_(0, stored.files.long(), cutting.elements * stored.dtype.itemsize)
        for file, nbytes in zip(self.files, needed.tolist(), strict=True):
            if nbytes and nbytes > (size := plain_file(folder, file, where).stat().st_size):
                raise CheckpointError(
                    f"{where} says that {file} holds {nbytes:.0f} bytes of tensors, and it has {size} bytes"
                )

    def check_same(self, other: CheckpointIndex) -> None:
        """Raise CheckpointError where another index says anything else: what was written, and what is read of it."""
        same = self.files == other.files and self.tensors.keys() == other.tensors.keys()
        compared: set[tuple[int, int]] = set()
        for name, a in self.tensors.items() if same else ():
            b = other.tensors[name]
            same = a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.files, b.files)
            if same and (id(a.cutting), id(b.cutting)) not in compared:
                compared.add((id(a.cutting), id(b.cutting)))
                same = torch.equal(a.cutting.begins, b.cutting.begins) and torch.equal(a.cutting.sizes, b.cutting.sizes)
            if not same:
                raise CheckpointError(f"{PARTS}/{INDEX} is not read as it was written: {quote(name)} differs")
        if not same:
            raise CheckpointError(f"{PARTS}/{INDEX} is not read as it was written")

    def check_names(self, ranks: int, where: str) -> None:
        """Check what can be without the model: what kinds of tensors there are, and for each of the ranks the states of
        its generators. Raises CheckpointError."""
        allowed = set(map(str, range(min(ranks, len(self.tensors)))))
        for name in self.tensors:
            kind, _, rest = name.partition(".")
            if not name.startswith(KINDS):
                raise CheckpointError(f"{where} has {quote(name)}, which is no part of a training state")
            owner = rest.partition(".")[0]  # a rank, or the layer of a recipe's state
            if (kind in ("rng", "replica") or (kind == "recipe" and owner.isdigit())) and owner not in allowed:
                raise CheckpointError(f"{where} has {quote(name)}, and the run had {ranks} ranks")
        for rank in range(ranks):
            for generator in ("python", "torch"):
                if f"rng.{rank}.{generator}" not in self.tensors:
                    raise CheckpointError(f"{where} lacks 'rng.{rank}.{generator}'")


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def index_name(folder: Path) -> str:
    """Return how messages name the index of a folder of parts, of this release or an earlier one."""
    return f"{PARTS}/{INDEX if os.path.lexists(folder / INDEX) else OLD_INDEX}"


def read_parts_index(folder: Path) -> CheckpointIndex:
    """Return what the index of a folder of parts says.

    Raises CheckpointError, one sentence, for an index that does not say where every element of every tensor is.
    """
    from .index_file import read_file
    from .old_index import read_json

    return (read_file if os.path.lexists(folder / INDEX) else read_json)(folder)
