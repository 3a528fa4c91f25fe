"""FP8 moments in checkpoints, whatever the layout: blocks of 128 values of whatever part of a parameter a rank has.

The elements of a rank's part follow one another in blocks, so that another part has other blocks. A sharded checkpoint
therefore holds the blocks of each part as they are, under a name that says which part it is:

    optimizer.decoder.layers.0.mlp.linear_fc1.weight.exp_avg@0=0-64&1=0-16,64-80

Here it is rows 0 to 63, and of these two ranges of columns; "exp_avg@" is of the whole parameter. A rank with the same
part takes the blocks, bit for bit. For another part the values of all parts that overlap it are put together and
encoded again, rounded to the nearest.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from te_models.checkpoints.io.boxes import Range, tiles
from te_models.checkpoints.io.errors import quote
from te_models.layers.optimizers.moments import (
    BLOCK,
    MOMENT_KEYS,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
)
from te_models.layers.tensor.fsdp import local_part

from ...parallel.parts import Box, LocalPart, ModelParts, cut_shape
from ...sizes import plural
from ..optimizer.adamw import Optimizer
from .checks import PARTS, TrainingCheckpointError, check_ranges

FIELDS = MOMENT_KEYS["float8"]
_NEAREST = 1 << 15
"""The random bits with which stochastic rounding is rounding to the nearest."""


def moment_fields(optimizer: Optimizer, own: ModelParts) -> dict[str, LocalPart]:
    """Return the fields of this rank's FP8 moments, by their names in checkpoints; none where moments are wider."""
    found: dict[str, LocalPart] = {}
    for name, state, part in _states(optimizer, own):
        if part.tensor.numel():  # of few rows, some ranks have none
            where = _text_of(part)
            found |= {_key(name, field, where): LocalPart.undivided(state[field]) for field in FIELDS}
    return found


@torch.no_grad()
def load_pieces(folder: Path, optimizer: Optimizer, own: ModelParts) -> None:
    """Take this rank's FP8 moments from a sharded checkpoint of any layout; nothing where moments are wider.

    Raises TrainingCheckpointError where the checkpoint lacks some of them.
    """
    mine = moment_fields(optimizer, own)
    if not mine:
        return
    saved = _Saved(folder)
    same = {key: part for key, part in mine.items() if saved.shape(key) == part.shape}
    saved.load(same)
    for name, state, part in _states(optimizer, own):
        if not part.tensor.numel() or all(_key(name, field, _text_of(part)) in same for field in FIELDS):
            continue
        missing = part.tensor.numel()
        zeros = part.tensor.new_zeros(part.tensor.shape, dtype=torch.float32)
        moments = [dataclasses.replace(part, tensor=zeros.clone()) for _ in range(2)]
        boxes: list[tuple[Range, ...]] = []
        for where in saved.parts_of(name):
            cuts = _cuts_of(where, part.shape)
            size = cut_shape(part.shape, cuts)
            theirs = torch.empty(size, dtype=torch.float32, device="meta")
            held = LocalPart(theirs, part.shape, cuts)
            boxes += [tuple(Range(b, b + n) for b, n in zip(*box[:2], strict=True)) for box in held.boxes()]
            common = list(_common(held, part))
            if not common:
                continue
            missing -= sum(math.prod(mine.shape) for _, mine in common)
            for moment, value in zip(moments, saved.moments(name, where, size), strict=True):
                source = LocalPart(value, part.shape, cuts)
                for theirs, mine in common:
                    moment.view(mine).copy_(source.view(theirs))
        if missing > 0:
            raise TrainingCheckpointError(f"{folder} lacks FP8 moments of {plural(missing, 'value')} of {name!r}")
        if not tiles(boxes, part.shape):  # so that what is missing was counted right
            raise TrainingCheckpointError(f"{folder} does not hold FP8 moments of each value of {name!r} once")
        _encode(state, *(moment.tensor for moment in moments))


@torch.no_grad()
def load_whole(tensors: Mapping[str, Tensor], optimizer: Optimizer, own: ModelParts) -> None:
    """Take this rank's FP8 moments from the moments of a whole model; nothing where moments are wider. Errors as for
    `Optimizer.load_state_tensors`."""
    for name, state, part in _states(optimizer, own):
        shape = own.shape(name)
        blocks = -(-torch.Size(shape).numel() // BLOCK)
        fields = {f"optimizer.{name}.{field}": tensors.get(f"optimizer.{name}.{field}") for field in FIELDS}
        expected = ((blocks, BLOCK), (blocks,), (blocks, BLOCK), (blocks,))
        for (key, value), size in zip(fields.items(), expected, strict=True):
            if value is None or tuple(value.shape) != size or value.dtype != state[key.rpartition(".")[2]].dtype:
                found = "nothing" if value is None else f"{value.dtype} {list(value.shape)}"
                raise TrainingCheckpointError(f"the state of the optimizer holds {found} as {key!r}; allowed: {size}")
        check_ranges({key: value for key, value in fields.items() if value is not None})
        values = _decode([value for value in fields.values() if value is not None], torch.Size(shape))
        if part.tensor.numel():
            _encode(state, *(part.of_whole(value) for value in values))


def _states(optimizer: Optimizer, own: ModelParts) -> Iterator[tuple[str, dict[str, Tensor], LocalPart]]:
    """Yield, of each parameter with FP8 moments, its name, this rank's fields, and the part that they are of."""
    for name, parameter in optimizer.stepped.items():
        fields = {key: local_part(field) for key, field in optimizer.fp8_moments(name).items()}
        if fields:
            yield name, fields, own.like(name, parameter, local_part(parameter))


def _key(name: str, field: str, where: str) -> str:
    return f"optimizer.{name}.{field}@{where}"


def _text_of(part: LocalPart) -> str:
    """Return which part of its tensor it is, as a name says it."""
    some = {dim: ranges for dim, ranges in sorted(part.cuts.items()) if ranges != ((0, part.shape[dim]),)}
    return "&".join(f"{dim}=" + ",".join(f"{b}-{e}" for b, e in ranges) for dim, ranges in some.items())


def _cuts_of(where: str, shape: tuple[int, ...]) -> dict[int, tuple[tuple[int, int], ...]]:
    """Undo `_text_of`, of a tensor of this shape. Raises TrainingCheckpointError for another text."""
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    try:
        for cut in where.split("&") if where else ():
            dim, _, ranges = cut.partition("=")
            words = (each.split("-") for each in ranges.split(","))
            found[int(dim)] = tuple((int(begin), int(end)) for begin, end in words)
        for dim, pairs in found.items():
            ends = [0, *(end for pair in pairs for end in pair), shape[dim] if 0 <= dim < len(shape) else -1]
            if ends != sorted(ends) or any(begin == end for begin, end in pairs):
                raise ValueError
    except ValueError:
        raise TrainingCheckpointError(f"{quote(where)} does not say a part of a parameter, such as '0=0-64'") from None
    return found


class _Saved:
    """The FP8 moments that a sharded checkpoint holds."""

    def __init__(self, folder: Path) -> None:
        from .sharded.index import read_parts_index

        self._folder = folder
        self._index = read_parts_index(folder / PARTS)
        self._parts: dict[str, list[str]] = {}
        for key in sorted(self._index.tensors):
            entry, _, where = key.partition("@")
            if entry.endswith(f".{FIELDS[0]}") and "@" in key:
                self._parts.setdefault(entry, []).append(where)

    def parts_of(self, name: str) -> list[str]:
        """Return which parts of a parameter there are."""
        return self._parts.get(f"optimizer.{name}.{FIELDS[0]}", [])

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Return the shape of an entry; None without one."""
        saved = self._index.tensors.get(key)
        return None if saved is None else saved.shape

    def load(self, parts: Mapping[str, LocalPart]) -> None:
        """Fill tensors with the entries of their names."""
        from .sharded.checkpoint import load_parts

        load_parts(self._folder, parts, self._index)

    def moments(self, name: str, where: str, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return both moments of a part of a parameter, float32 of shape `size`."""
        fields = {}
        for field in FIELDS:
            key = _key(name, field, where)
            shape = self.shape(key)
            if shape is None:
                raise TrainingCheckpointError(f"{self._folder} lacks {key!r}")
            dtype = torch.float32 if field.endswith("_scale_inv") else torch.float8_e4m3fn
            fields[key] = LocalPart.undivided(torch.empty(shape, dtype=dtype, device="cpu"))
        self.load(fields)
        return _decode([part.tensor for part in fields.values()], torch.Size(size))


def _decode(fields: list[Tensor], size: torch.Size) -> tuple[Tensor, Tensor]:
    first, first_scale, second, second_scale = fields
    needed = -(-size.numel() // BLOCK)
    if any(x.numel() != BLOCK * scale.numel() for x, scale in ((first, first_scale), (second, second_scale))):
        raise TrainingCheckpointError(f"FP8 moments do not have a scale for each {BLOCK} values")
    if min(first_scale.numel(), second_scale.numel()) < needed:
        raise TrainingCheckpointError(f"FP8 moments of {size.numel()} values have fewer than {needed} blocks")
    return (
        decode_first(first.view(-1, BLOCK), first_scale.view(-1), size),
        decode_second(second.view(-1, BLOCK), second_scale.view(-1), size),
    )


def _encode(state: Mapping[str, Tensor], first: Tensor, second: Tensor) -> None:
    """Store both moments, float32 of this rank's part, in its fields: the first of their blocks."""
    bits = torch.full((first.numel(),), _NEAREST, dtype=torch.int32, device=first.device)
    encoded = *encode_first(first.reshape(-1), bits), *encode_second(second.reshape(-1), bits)
    for field, value in zip(FIELDS, encoded, strict=True):
        rows = state[field].view(-1, BLOCK) if value.dim() == 2 else state[field].view(-1)
        rows[: value.shape[0]].copy_(value)


def _common(source: LocalPart, target: LocalPart) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes that two parts of a tensor have in common, each as it lies in either."""
    for one in source.boxes():
        for other in target.boxes():
            begin = tuple(map(max, one.begin, other.begin))
            ends = (tuple(b + n for b, n in zip(box.begin, box.shape, strict=True)) for box in (one, other))
            shape = tuple(end - first for end, first in zip(map(min, *ends), begin, strict=True))
            if min(shape, default=1) > 0:
                yield one.within(begin, shape), other.within(begin, shape)
