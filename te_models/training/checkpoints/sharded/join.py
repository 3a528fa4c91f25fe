"""Who writes what of a sharded checkpoint: ranks say what they have, and the first rank joins that to an
`CheckpointIndex`.

One rank writes each box that several have, such that all copies write as many bytes. Ranks send names and numbers only,
and these packed; the first rank works on flat arrays, because ranks x tensors are millions.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.dtypes import bit_width, dtype_name, torch_dtype
from te_models.checkpoints.io.errors import quote

from ....parallel.parts import LocalPart
from ...ranks.data_parallel import Ranks
from .index import CheckpointIndex, Cutting, IndexedTensor, file_of

Shape = tuple[int, ...]
_SMALL = 1 << 12
"""Bytes below which a box is written by the first rank that has it."""


def describe_parts(parts: Mapping[str, LocalPart]) -> bytes:
    """Return what `join` must know of this rank's parts."""
    numbers: dict[object, int] = {}
    patterns, chosen = [], []
    for part in parts.values():
        key = part.tensor.dtype, part.shape, tuple(sorted(part.cuts.items()))
        number = numbers.setdefault(key, len(patterns))
        if number == len(patterns):
            boxes = [[box.begin, box.shape] for box in part.boxes()]
            patterns.append([dtype_name(part.tensor.dtype), part.shape, boxes])
        chosen.append(number)
    return zlib.compress(json.dumps([list(parts), chosen, patterns]).encode(), 1)


class Joined(NamedTuple):
    """What is saved, and of each rank which of its boxes, in their order, it writes: a byte each, 0 or 1."""

    index: CheckpointIndex
    writes: list[bytes]


class _Boxes:
    """Distinct boxes of distinct kinds, a kind being a dtype and the shape of a whole tensor, by number."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, Shape], int] = {}
        self.numbers: dict[tuple[int, Shape, Shape], int] = {}

    def kind(self, dtype: str, shape: Shape) -> int:
        return self.kinds.setdefault((dtype, shape), len(self.kinds))

    def number(self, kind: int, begin: Shape, size: Shape) -> int:
        return self.numbers.setdefault((kind, begin, size), len(self.numbers))


def join(descriptions: Iterable[bytes]) -> Joined:
    """Return what all ranks have, each of whose boxes one of them writes. descriptions: of each rank.

    Raises CheckpointError where ranks disagree about the shape or dtype of a tensor.
    """
    names: dict[str, int] = {}
    boxes = _Boxes()
    of_names, of_kinds, item_names, item_boxes = [], [], [], []
    for text in descriptions:
        own, chosen, patterns = json.loads(zlib.decompress(text))
        kinds = [boxes.kind(dtype, tuple(shape)) for dtype, shape, _ in patterns]
        numbered = [
            [boxes.number(kind, tuple(begin), tuple(size)) for begin, size in its]
            for kind, (_, _, its) in zip(kinds, patterns, strict=True)
        ]
        ids = _tensor([names.setdefault(name, len(names)) for name in own])
        pattern, counts = _tensor(chosen), _tensor([len(its) for its in numbered])
        starts, flat = counts.cumsum(0) - counts, _tensor([number for its in numbered for number in its])
        repeats = counts[pattern]
        of_names.append(ids)
        of_kinds.append(_tensor(kinds)[pattern])
        item_names.append(ids.repeat_interleave(repeats).int())
        within = torch.arange(int(repeats.sum()), device="cpu") - (repeats.cumsum(0) - repeats).repeat_interleave(
            repeats
        )
        item_boxes.append(flat[starts[pattern].repeat_interleave(repeats) + within].int())
    kind_of = _agreed(torch.cat(of_names), torch.cat(of_kinds), list(names), list(boxes.kinds))
    lengths = [len(items) for items in item_names]
    return _joined(list(names), boxes, kind_of, torch.cat(item_names), torch.cat(item_boxes), lengths)


def _tensor(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _agreed(ids: Tensor, kinds: Tensor, names: list[str], known: list[tuple[str, Shape]]) -> list[int]:
    """Return the kind of each tensor, the same on all ranks."""
    found = torch.zeros(len(names), dtype=torch.int64, device="cpu")
    found[ids] = kinds
    differing = (found[ids] != kinds).nonzero().view(-1).tolist()
    if differing:
        name, (first, other) = (
            names[int(ids[differing[0]])],
            (known[k] for k in (kinds[differing[0]], found[ids[differing[0]]])),
        )
        raise CheckpointError(
            f"ranks have {quote(name)} as {first[0]} {list(first[1])} and as {other[0]} {list(other[1])}"
        )
    return found.tolist()


def _joined(
    names: list[str], boxes: _Boxes, kind_of: list[int], ids: Tensor, numbers: Tensor, lengths: list[int]
) -> Joined:
    """ids, numbers: of each box of each rank in turn, the number of its tensor and of the box; lengths: how many boxes
    each rank has."""
    kinds, listed = list(boxes.kinds), sorted(boxes.numbers)
    places = _places(names, boxes, listed)
    key = places.of_name[ids.long()] * len(listed) + places.of_box[numbers.long()]
    order = key.sort(stable=True).indices
    groups, copies = key[order].unique_consecutive(return_counts=True)
    ranks = torch.arange(len(lengths), dtype=torch.int32, device="cpu").repeat_interleave(_tensor(lengths))
    box = groups % max(len(listed), 1)
    nbytes = _tensor([math.prod(size) * (bit_width(kinds[kind][0]) or 0) // 8 for kind, _, size in listed])[box]
    chosen = order[_chosen(ranks[order], copies, nbytes)]
    writes = torch.zeros(len(ids), dtype=torch.uint8, device="cpu")
    writes[chosen] = 1
    counts = torch.bincount(groups // max(len(listed), 1), minlength=len(names)).tolist()
    cuttings: dict[tuple[object, ...], Cutting] = {}
    tensors: dict[str, IndexedTensor] = {}
    rows = zip(sorted(names), box.split(counts), ranks[chosen].split(counts), strict=True)
    number_of = {name: number for number, name in enumerate(names)}
    for name, its, files in rows:
        kind = kind_of[number_of[name]]
        shape, cut = kinds[kind][1], tuple(its.tolist())
        if (shape, cut) not in cuttings:
            table = ([listed[n][at] for n in cut] for at in (1, 2))
            both = (torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(cut), len(shape)) for rows in table)
            cuttings[shape, cut] = Cutting(shape, *both)
        tensors[name] = IndexedTensor(torch_dtype(kinds[kind][0]), cuttings[shape, cut], files)
    index = CheckpointIndex(tensors, tuple(file_of(rank) for rank in range(len(lengths))))
    return Joined(index, [bytes(its.tolist()) for its in writes.split(lengths)])


class _Places(NamedTuple):
    of_name: Tensor
    of_box: Tensor


def _places(names: list[str], boxes: _Boxes, listed: list[tuple[int, Shape, Shape]]) -> _Places:
    """Return at which place of their sorted order tensors and boxes are, by their numbers."""
    of_name, of_box = (
        torch.empty(len(names), dtype=torch.int64, device="cpu"),
        torch.empty(len(listed), dtype=torch.int64, device="cpu"),
    )
    of_name[_tensor(sorted(range(len(names)), key=names.__getitem__))] = torch.arange(len(names), device="cpu")
    of_box[_tensor([boxes.numbers[box] for box in listed])] = torch.arange(len(listed), device="cpu")
    return _Places(of_name, of_box)


def _chosen(ranks: Tensor, copies: Tensor, nbytes: Tensor) -> Tensor:
    """Return which of all items are written: one of each group of copies, so that every copy writes the same share.
    ranks: of all items, group after group."""
    first = copies.cumsum(0) - copies
    sets = ranks[first].long() * (len(ranks) + 1) + copies  # ranks with the same first one have the same boxes
    order = sets.sort(stable=True).indices
    sizes = nbytes[order].double()
    _, inverse, counts = sets[order].unique_consecutive(return_inverse=True, return_counts=True)
    before, ends = sizes.cumsum(0) - sizes, counts.cumsum(0)
    begin = before[ends - counts][inverse]
    total = torch.zeros(len(counts), dtype=torch.float64, device="cpu").index_add_(0, inverse, sizes)[inverse]
    share = ((before - begin) / total.clamp(min=1) * copies[order]).long()
    number = torch.empty_like(copies)
    number[order] = share.minimum(copies[order] - 1)
    return first + number.where(nbytes >= _SMALL, 0)  # so that few files have all step counts


def written_boxes(parts: Mapping[str, LocalPart], writes: bytes) -> dict[str, Tensor]:
    """Return the boxes that this rank writes, by the names that they have in its file."""
    boxes = [(name, part, box) for name, part in parts.items() for box in part.boxes()]
    return {
        box_name(name, box.begin): part.view(box).detach()
        for (name, part, box), writes_it in zip(boxes, writes, strict=True)
        if writes_it
    }


def box_name(name: str, begin: Shape) -> str:
    """Return the name that a box of a tensor has in a file."""
    return f"{name}@{','.join(map(str, begin))}"


@dataclass(frozen=True)
class Exchange:
    """folder: what is written, for messages. group: of all ranks; None: the default one."""

    folder: Path
    ranks: Ranks
    group: dist.ProcessGroup | None

    def turn(self, own: Callable[[], Any], join: Callable[[list[Any]], list[Any]]) -> Any:
        """Do `own` on each rank, give the results to `join` on the first one, and return there and elsewhere what that
        answers to the rank. Raises CheckpointError on every rank where one of these fails."""
        value, failure = self._attempt(own)
        count = self.ranks.world_size
        found: list[Any] | None = [None] * count if self.ranks.is_main else None
        if dist.is_initialized():
            dist.gather_object((value, failure), found, dst=0, group=self.group)
        else:  # alone
            found = [(value, failure)]
        answers: list[Any] | None = None
        if found is not None:
            answers, failure = None, next((failure for _, failure in found if failure), None)
            if failure is None:
                answers, failure = self._attempt(lambda: join([value for value, _ in found]))
            answers = [(answer, failure) for answer in answers or [None] * count]
        received: list[Any] = [None]
        if dist.is_initialized():
            dist.scatter_object_list(received, answers, src=0, group=self.group)
        else:
            received = list(answers or [None])
        answer, failure = received[0]
        if failure is not None:
            raise CheckpointError(f"writing {self.folder} failed: {failure}")
        return answer

    def _attempt(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        try:
            return work(), None
        except Exception as error:  # told to the waiting other ranks
            return None, f"rank {self.ranks.rank}: {error}"
