"""Which part of each whole tensor this rank has: what tensor and expert parallelism cut, and FSDP2 of what they leave.

A part is given by ranges of indices along some dimensions (`Cuts`), several along one where a layer joins q, k and v. A
checkpoint writes it as boxes, one for each combination of ranges, and any other layout reads the boxes that it needs.
`load_own_parts` fills a sharded model from a model folder, of which each rank reads its own parts and nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.folder.checkpoint import Checkpoint
from te_models.checkpoints.folder.load import layout_of_names
from te_models.checkpoints.mapping.param_shapes import is_expert_stack
from te_models.checkpoints.mapping.parameters import StoredParameters
from te_models.checkpoints.mapping.quantized_format import SUFFIXES, empty, quantized_metadata, quantizer_from_metadata
from te_models.checkpoints.mapping.rank_shards import Cuts, Ranges, RankPart, cut_part, cut_shape, parts
from te_models.layers import QuantizedTensor
from te_models.layers.tensor.fsdp import entries_of_rows, is_one_matrix, largest_shard, local_part

from ..config import ConfigError
from ..lora.model import base_name, base_state_dict, lora_state_dict
from ..lora.parts import adapter_parameters, adapter_parts
from ..model import GPTModel
from ..model.parallel import shard_place

Shape = tuple[int, ...]


class Box(NamedTuple):
    """Indices of a whole tensor from `begin` on, at `offset` and following of a rank's part; `shape` of both."""

    begin: Shape
    shape: Shape
    offset: Shape

    def within(self, begin: Shape, shape: Shape) -> Box:
        """Return a box inside of this one, of indices from `begin` on of the whole tensor."""
        offset = (o + b - own for o, b, own in zip(self.offset, begin, self.begin, strict=True))
        return Box(begin, shape, tuple(offset))


@dataclass(frozen=True, eq=False)
class LocalPart:
    """A rank's part of a tensor of shape `shape`. cuts: the ranges that it has; dimensions without any it has whole."""

    tensor: Tensor
    shape: Shape
    cuts: Cuts

    @classmethod
    def undivided(cls, tensor: Tensor) -> LocalPart:
        """Return a tensor that this rank has whole."""
        return cls(tensor, tuple(tensor.shape), {})

    def ranges(self, dim: int) -> Iterator[tuple[int, int, int]]:
        """Return (begin, end, offset) of each range that the part has of a dimension: where it is of the whole tensor,
        and from where on of this rank's."""
        return _with_offsets(self.cuts.get(dim, ((0, self.shape[dim]),)))

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of the part, none of an empty one."""
        along = [list(self.ranges(dim)) for dim in range(len(self.shape))]
        for box in itertools.product(*along):
            shape = tuple(end - begin for begin, end, _ in box)
            if 0 not in shape:
                yield Box(tuple(begin for begin, _, _ in box), shape, tuple(offset for _, _, offset in box))

    def view(self, box: Box) -> Tensor:
        """Return what of this rank's tensor a box is."""
        found = self.tensor
        for dim, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
            found = found.narrow(dim, offset, size)
        return found

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return this part of a whole tensor."""
        return cut_part(whole, self.cuts)


class ShardOfParameter(NamedTuple):
    """Which of `ranks` shards along a dimension a rank has: all have `each` indices in turn until none are left. A part
    of a parameter that is no DTensor says so as its attribute `shard_place`."""

    rank: int
    ranks: int
    dim: int
    each: int

    def ends(self, size: int) -> tuple[int, int]:
        """Return where the rank's indices begin and end, of `size` in all."""
        begin = min(self.rank * self.each, size)
        return begin, min(begin + self.each, size)

    def of_whole(self, tensor: Tensor) -> Tensor:
        """Return the rank's part of a tensor, a view."""
        begin, end = self.ends(tensor.shape[self.dim])
        return tensor.narrow(self.dim, begin, end - begin)

    def filled_up(self, tensor: Tensor) -> Tensor:
        """Return the rank's part of a tensor, flat, with zeros up to the elements of the largest part."""
        flat = self.of_whole(tensor).reshape(-1)
        missing = self.elements(tensor) - flat.numel()
        return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat

    def shared_with(self, tensor: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of a tensor that is cut along its first dimension, and of `rows`, whose each row is the part of a
        rank (`filled_up`): all whole parts, and the one that is smaller. They are as few for any number of ranks.
        """
        size, whole = tensor.shape[0], tensor.shape[0] // max(1, self.each)
        if whole:
            own = tensor if whole * self.each == size else tensor.narrow(0, 0, whole * self.each)
            some = rows if whole == self.ranks else rows.narrow(0, 0, whole)
            yield own.unflatten(0, (whole, self.each)), some.unflatten(1, (self.each, *tensor.shape[1:]))
        if whole * self.each < size:
            last = tensor.narrow(0, whole * self.each, size - whole * self.each)
            yield last, rows[whole, : last.numel()].view(last.shape)

    def elements(self, tensor: Tensor) -> int:
        """Return how many elements of a tensor the largest part has."""
        return tensor.numel() // max(1, tensor.shape[self.dim]) * self.each


def _with_offsets(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    offset = 0
    for begin, end in ranges:
        yield begin, end, offset
        offset += end - begin


class ModelParts:
    """The parts of a model's tensors that this rank has, whatever the model is split or sharded over."""

    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self._weights = expected_tensors(model.config, model.expert_layout)
        self._adapters = adapter_parameters(model.whole or model, self._weights)
        self._shapes = self._weights | {name: its.shape for name, its in self._adapters.items()}
        self._owned = self._at()

    def shape(self, name: str) -> Shape:
        """Return the shape of a whole parameter."""
        return tuple(self._shapes[name])

    def is_split(self, name: str) -> bool:
        """Whether tensor parallelism cuts a parameter."""
        return self._owned[name].dim is not None

    def split_group(self, name: str) -> dist.ProcessGroup | None:
        """Return the ranks over which tensor parallelism splits a parameter, if it is one that it splits."""
        return self.model.etp_group if self._is_apart(name) else self.model.tp_group

    def of_split_ranks(self, name: str) -> list[RankPart]:
        """Return the parts of a parameter of the ranks of its `split_group`, in their order."""
        return [its[name] for its in (self._by_etp if self._is_apart(name) else self._by_tp)]

    def _is_apart(self, name: str) -> bool:
        return is_expert_stack(name) and self.model.etp_group is not None

    @cached_property
    def _by_tp(self) -> list[Mapping[str, RankPart]]:
        ranks = range(shard_place(self.model).tp_size)
        return [self._at(tp_rank=rank) for rank in ranks]

    @cached_property
    def _by_etp(self) -> list[Mapping[str, RankPart]]:
        return [self._at(etp_rank=rank) for rank in range(shard_place(self.model).expert_split[1])]

    def _at(self, **changes: int) -> Mapping[str, RankPart]:
        owned = parts(self.model.config, self._weights, dataclasses.replace(shard_place(self.model), **changes))
        return owned | adapter_parts(self._adapters, self._weights, owned)

    def names(self) -> set[str]:
        """Return the names of all parameters of the whole model, and of what ranks have of it in files."""
        return {*self._shapes, *base_state_dict(self.model.whole or self.model), *self.stored()}

    def elsewhere(self) -> list[str]:
        """Return the names of the parameters that only other pipeline stages have."""
        own = {base_name(name) or name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return [name for name in self._shapes if name not in own]

    def stored(self) -> dict[str, LocalPart]:
        """Return everything that a checkpoint holds of the model but for `adapters`, by the names that it has in files:
        plain tensors, and the fields of quantized ones, eight-bit numbers as bytes."""
        found: dict[str, LocalPart] = {}
        for name, tensor in base_state_dict(self.model).items():
            local = local_part(tensor).detach()
            if isinstance(local, QuantizedTensor):
                found |= dict(self.fields(name, tensor, local))
            else:
                found[name] = self.like(name, tensor, local)
        return found

    def adapters(self) -> dict[str, LocalPart]:
        """Return the adapters that this rank has, by name."""
        return {name: self.like(name, t, t) for name, t in lora_state_dict(self.model).items()}

    def like(self, name: str, parameter: Tensor, tensor: Tensor) -> LocalPart:
        """Return the part of a tensor that is divided among the ranks as a parameter is. tensor: this rank's."""
        whole, cuts = self._shapes[name], dict(self._owned[name].cuts())
        place: ShardOfParameter | None = getattr(parameter, "shard_place", None)
        if local_part(parameter) is not parameter:
            rank, ranks, dim = _place_of_shard(parameter)
            place = ShardOfParameter(
                rank, ranks, dim, largest_shard(parameter, self._owned[name].shape(whole)[dim], ranks)
            )
        if place is not None:
            size = self._owned[name].shape(whole)[place.dim]
            cuts[place.dim] = _narrow(cuts.get(place.dim, ((0, size),)), *place.ends(size))
        return LocalPart(tensor, whole, cuts)

    def wholes(self) -> dict[str, Tensor]:
        """Return the tensors of the whole model without their data, quantized ones as such."""
        found: dict[str, Tensor] = {}
        for name, tensor in base_state_dict(self.model.whole or self.model).items():
            local = local_part(tensor)
            if isinstance(local, QuantizedTensor):
                found[name] = empty(name, self._shapes[name], quantized_metadata(local.quantizer, local.dtype), "meta")
            else:
                found[name] = torch.empty(self._shapes[name], dtype=tensor.dtype, device="meta")
        return found

    def fields(self, name: str, parameter: Tensor, local: QuantizedTensor) -> Iterator[tuple[str, LocalPart]]:
        """Yield this rank's part of each stored field of a quantized parameter, by its name in files, eight-bit numbers
        as bytes. local: its tensor here."""
        whole = empty(name, self._shapes[name], quantized_metadata(local.quantizer, local.dtype), "meta").fields
        by_field = self._owned[name].field_cuts(name, self._shapes[name], local.quantizer)
        for layout in local.layouts:
            field, cuts = getattr(local, layout.name), dict(by_field[layout.name])
            shape = tuple(whole[layout.name].shape)
            one_matrix = is_one_matrix(local)
            if local_part(parameter) is not parameter and not (one_matrix and layout.block is None):
                rank, ranks, _ = _place_of_shard(parameter)
                each = largest_shard(parameter, parameter.shape[0], ranks)
                axis, entries = entries_of_rows(local, layout, each)
                assert axis is not None, "a field with blocks"
                begin = rank * entries
                cuts[axis] = _narrow(cuts.get(axis, ((0, shape[axis]),)), begin, begin + field.shape[axis])
            values = field.view(torch.uint8) if field.dtype.itemsize == 1 else field
            yield name + SUFFIXES[layout.name], LocalPart(values, shape, cuts)

    def groups(self) -> dict[str, tuple[dist.ProcessGroup, ...]]:
        """Return the groups over which each trainable parameter is divided, by name: a sum over all of its elements is
        the sum over their ranks."""
        found: dict[str, tuple[dist.ProcessGroup, ...]] = {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            owned, groups = self._owned[name], []
            if local_part(parameter) is not parameter:
                mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
                groups.append(mesh.get_group(mesh.ndim - 1))
            if owned.experts is not None and self.model.ep_group is not None:
                groups.append(self.model.ep_group)
            split = self.split_group(name)
            if owned.dim is not None and split is not None:
                groups.append(split)
            found[name] = tuple(groups)
        return found


def _place_of_shard(parameter: Any) -> tuple[int, int, int]:
    """Return (number of this rank's shard, number of shards, dimension) of a parameter that FSDP2 shards."""
    mesh = parameter.device_mesh
    return mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1), parameter.placements[-1].dim


def _narrow(ranges: Ranges, begin: int, end: int) -> Ranges:
    """Return indices begin .. end - 1 of what ranges give one after the other."""
    found = []
    for first, last, offset in _with_offsets(ranges):
        low, high = max(begin, offset), min(end, offset + last - first)
        if low < high:
            found.append((first + low - offset, first + high - offset))
    return tuple(found)


@torch.no_grad()
def load_own_parts(model: GPTModel, checkpoint: Checkpoint) -> None:
    """Fill this rank's part of every tensor, in the dtype that it has. Weights that are stored quantized in the model
    are quantized from the values of this rank's part, or take over the bits of a folder that has them in their format.

    Raises CheckpointError for a folder that does not fit the model, ConfigError for one that is quantized in another
    format than the model's weights are stored in.
    """
    checkpoint.check_values()
    checkpoint.check_elements()
    tensors = dict(model.stored_tensors())
    whole = model.whole or model
    layout = layout_of_names(dict(whole.stored_tensors()), model.config, "the names of the parameters to load")
    stored = StoredParameters(checkpoint.store, checkpoint.namespace, model.config, checkpoint.formats, layout)
    per_gemm = cache(
        lambda: StoredParameters(checkpoint.store, checkpoint.namespace, model.config, checkpoint.formats, "per-gemm")
    )
    shapes, own = expected_tensors(model.config, layout), ModelParts(model)
    for name, tensor in tensors.items():
        local = local_part(tensor).detach()
        cuts = own.like(name, tensor, local).cuts
        if 0 in cut_shape(shapes[name], cuts):
            continue
        if name in stored.formats:
            _check_format(checkpoint, name, local, stored.formats[name])
            for field, part in own.fields(name, tensor, local):  # type: ignore[arg-type]
                stored.fill_part(field, part.cuts, part.tensor.view(stored.dtype(field)))
        elif isinstance(local, QuantizedTensor) and local.dim() == 3:
            first = cuts.get(0, ((0, 0),))[0][0]
            rest = {dim - 1: ranges for dim, ranges in cuts.items() if dim}
            for number, member in enumerate(local.members(), first):  # type: ignore[attr-defined]
                member.copy_(per_gemm().entry(f"{name}{number}", rest))
        elif isinstance(local, QuantizedTensor):
            local.copy_(stored.entry(name, cuts))
        else:
            stored.fill_part(name, cuts, local)
    checkpoint.files.finish_checks()


def _check_format(checkpoint: Checkpoint, name: str, local: Tensor, stored: Mapping[str, Any]) -> None:
    quantizer, _ = quantizer_from_metadata(name, stored)
    if isinstance(local, QuantizedTensor) and local.quantizer == quantizer:
        return
    raise ConfigError(
        f"{checkpoint.path} holds {name} quantized, and the sharded model stores it otherwise; allowed: "
        "precision.quantized_weights with a recipe of the folder's format, or plain weights (te-models dequantize)"
    )
