"""Saving a model that ranks have in parts, whatever divides it: the others send the first one their parts of a tensor.

FSDP2 may shard what tensor and expert parallelism leave to a rank. So a tensor becomes whole in this order: the shards
of a rank's part, the parts of the ranks that split layers, the experts of the ranks that share them. Every rank holds
one tensor at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.layers import QuantizedTensor
from te_models.layers.tensor.fsdp import (
    check_scales_are_shared,
    entries_of_rows,
    is_one_matrix,
    largest_shard,
    local_part,
    one_per_matrix,
    padded_field,
)

from ..parallel import shard_place
from .collected_saving import Collection, save_collected

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_models.checkpoints.mapping.rank_shards import Cuts, RankPart

    from ..gpt import GPTModel


def save_split(
    model: GPTModel,
    folder: str | os.PathLike[str],
    source_dir: str | os.PathLike[str] | None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a split or sharded model; called by all ranks of a copy, and by all of the mesh where FSDP2 shards it.
    Quantized weights are put together as they are.

    Raises CheckpointError on every rank where a matrix is split whose format has one number per matrix, and the ranks
    have different ones, and as `save_collected` does; ValueError where what is no expert is sharded over several
    meshes, or a quantized weight along another dimension than the first.
    """
    parts = _Parts(model)
    parts.check_numbers()
    save_collected(parts, model, folder, source_dir, overwrite=overwrite)


@dataclass(frozen=True)
class _Split:
    """How the ranks of one group share a tensor: the ranges of each, along one dimension."""

    group: dist.ProcessGroup
    cuts: Sequence[Cuts]

    @property
    def dim(self) -> int:
        ((dim, _),) = self.cuts[0].items()
        return dim

    def whole(self, part: Sequence[int]) -> list[int]:
        """Return the shape of all parts together."""
        return [*part[: self.dim], max(end for its in self.cuts for _, end in its[self.dim]), *part[self.dim + 1 :]]

    def collect(self, own: Tensor, device: torch.device) -> Tensor | None:
        """Send this rank's part to the first rank of the group; there, return all of them together on `device`."""
        sent = own.contiguous().flatten().view(torch.uint8)
        if self.group.rank() != 0:
            dist.send(sent, group=self.group, group_dst=0)
            return None
        whole = torch.empty(self.whole(own.shape), dtype=own.dtype, device=device)
        for rank, its in enumerate(self.cuts):
            shape = [
                *own.shape[: self.dim],
                sum(end - begin for begin, end in its[self.dim]),
                *own.shape[self.dim + 1 :],
            ]
            if rank > 0:
                sent = torch.empty(math.prod(shape) * own.itemsize, dtype=torch.uint8, device=own.device)
                dist.recv(sent, group=self.group, group_src=rank)
            part, offset = sent.view(own.dtype).view(shape), 0
            for begin, end in its[self.dim]:
                size = end - begin
                whole.narrow(self.dim, begin, size).copy_(part.narrow(self.dim, offset, size))
                offset += size
        return whole


@dataclass(frozen=True)
class _Entry:
    """One tensor of the files: what this rank has of it, a DTensor where FSDP2 shards that, in bytes where it has eight
    bits; and how it is shared, by tensor parallelism, over `group`, first."""

    parameter: str
    own: Any
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    tp: _Split | None
    ep: _Split | None
    one_number: bool
    """The parameter is split, and this number of it goes with every part."""
    entries: tuple[int, int] | None = None
    """Dimension along which the shards are padded, and how many entries they have together without that."""


class _Parts(Collection):
    """This rank's parts of a model, by the names that they have in files, and how they become the whole."""

    def __init__(self, model: GPTModel) -> None:
        from te_models.checkpoints import expected_tensors
        from te_models.checkpoints.mapping.param_shapes import is_expert_stack
        from te_models.checkpoints.mapping.rank_shards import ShardPlace, parts

        place, self._shapes = shard_place(model), expected_tensors(model.config, model.expert_layout)
        self._tp, self._ep, self._etp = model.tp_group, model.ep_group, model.etp_group
        etp_rank, etp_size = place.expert_split
        tp = [ShardPlace(tp_rank=rank, tp_size=place.tp_size) for rank in range(place.tp_size)]
        ep = [ShardPlace(ep_rank=rank, ep_size=place.ep_size) for rank in range(place.ep_size)]
        etp = [ShardPlace(etp_rank=rank, etp_size=etp_size) for rank in range(etp_size)]
        owned = [[parts(model.config, self._shapes, one) for one in row] for row in (tp, ep, etp)]
        self._tensors = {name: tensor.detach() for name, tensor in model.stored_tensors()}
        self._entries: dict[str, _Entry] = {}
        for name, tensor in self._tensors.items():
            by_tp, by_ep, by_etp = ([its[name] for its in ranks] for ranks in owned)
            split = (self._etp, by_etp) if self._etp is not None and is_expert_stack(name) else (self._tp, by_tp)
            self._entries |= dict(self._entries_of(name, tensor, *split, by_ep))
        self.names = list(self._entries)
        self._mesh = self._mesh_of_shards()
        first_of_shards = self._mesh is None or not any(self._mesh.get_coordinate() or ())
        self.first = first_of_shards and place.tp_rank == place.ep_rank == etp_rank == 0
        device: Any = self._entries[self.names[0]].own.device if self._mesh is None else self._mesh.device_type
        self._device = torch.device(device)

    def _mesh_of_shards(self) -> DeviceMesh | None:
        """Return the mesh over which FSDP2 shards what is no expert; None where it shards nothing."""
        from te_models.checkpoints.mapping.param_shapes import is_expert_stack

        sharded: dict[str, Any] = {name: t for name, t in self._tensors.items() if local_part(t) is not t}
        meshes = {t.device_mesh for name, t in sharded.items() if not is_expert_stack(name)}
        if len(meshes) > 1:
            raise ValueError("parameters are sharded over several meshes; allowed: one, and another one for experts")
        meshes = meshes or {t.device_mesh for t in sharded.values()}
        return next(iter(meshes), None)

    def _entries_of(
        self, name: str, tensor: Tensor, group: dist.ProcessGroup | None, by_tp: list[RankPart], by_ep: list[RankPart]
    ) -> Iterator[tuple[str, _Entry]]:
        """group: the ranks that split the tensor, whose parts are by_tp."""
        from te_models.checkpoints.mapping.quantized_format import SUFFIXES

        local = local_part(tensor)
        if not isinstance(local, QuantizedTensor):
            own = tensor if local is tensor else _sharded(tensor, local, tensor.placements)  # type: ignore[attr-defined]
            tp, ep = ([part.cuts() for part in row] for row in (by_tp, by_ep))
            yield name, _Entry(name, own, local.dtype, group, _split(group, tp), _split(self._ep, ep), one_number=False)
            return
        shape = self._shapes[name]
        fields = [[part.field_cuts(name, shape, local.quantizer) for part in row] for row in (by_tp, by_ep)]
        whole = {field: (own, None) for field, own in local.fields.items()}
        for field, (own, entries) in (whole if local is tensor else _sharded_fields(name, tensor, local)).items():
            tp, ep = ([its[field] for its in row] for row in fields)
            shared, dtype = bool(by_tp[0].cuts()) and not tp[0], getattr(local, field).dtype
            splits = _split(group, tp), _split(self._ep, ep)
            entry = _Entry(name, own, dtype, group, *splits, one_number=shared, entries=entries)
            yield name + SUFFIXES[field], entry

    def check_numbers(self) -> None:
        """Raise CheckpointError, on every rank of the model, where a number that goes with every part of a matrix is
        not the same on all of them."""
        from te_models.checkpoints import CheckpointError

        unlike = len(self.names)
        for number, entry in enumerate(self._entries.values()):
            if entry.one_number and entry.group is not None:
                own = entry.own.contiguous().flatten().view(torch.uint8)
                others = [torch.empty_like(own) for _ in range(entry.group.size())]
                dist.all_gather(others, own, group=entry.group)
                if not all(torch.equal(own, other) for other in others):
                    unlike = min(unlike, number)
        found = torch.tensor([unlike], device=self._device)
        for group in (self._tp, self._ep, self._etp):
            if group is not None:
                dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
        if int(found) < len(self.names):
            parameter = self._entries[self.names[int(found)]].parameter
            raise CheckpointError(f"{parameter} is split over ranks that quantized it with scales of their own")

    def wholes(self) -> dict[str, Tensor]:
        """See `Collection`."""
        from te_models.checkpoints.mapping.quantized_format import empty, quantized_metadata

        found: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            shape, local = self._shapes[name], local_part(tensor)
            if isinstance(local, QuantizedTensor):
                found[name] = empty(name, shape, quantized_metadata(local.quantizer, local.dtype), "meta")
            else:
                found[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return found

    def announce(self, number: int) -> int:
        """See `Collection`. Every rank tells what it knows, over one dimension after the other; behind the last one all
        know what the first rank says."""
        message = torch.tensor([number], device=self._device)
        groups = () if self._mesh is None else [self._mesh.get_group(dim) for dim in range(self._mesh.ndim)]
        for group in (*groups, self._ep, self._etp, self._tp):
            if group is not None:
                dist.broadcast(message, group=group, group_src=0)
        return int(message)

    @torch.no_grad()
    def collect(self, number: int) -> Tensor | None:
        """See `Collection`."""
        entry = self._entries[self.names[number]]
        found: Tensor | None = entry.own
        if local_part(entry.own) is not entry.own:
            found = entry.own.full_tensor()
            assert found is not None
            if entry.entries is not None:
                dim, count = entry.entries
                found = found.narrow(dim, 0, count).contiguous()
            if any(entry.own.device_mesh.get_coordinate()):
                return None
        memory = torch.device("cpu")
        if entry.tp is not None and found is not None:
            found = entry.tp.collect(found, self._device if entry.ep is not None else memory)
        if entry.ep is not None and (entry.group is None or entry.group.rank() == 0) and found is not None:
            found = entry.ep.collect(found, memory)
        return None if found is None or not self.first else found.to(memory).view(entry.dtype)


def _split(group: dist.ProcessGroup | None, cuts: list[Cuts]) -> _Split | None:
    return None if group is None or not cuts[0] else _Split(group, cuts)


def _sharded(parameter: Any, values: Tensor, placements: Any) -> Any:
    """Return values that are sharded over the mesh of a parameter, on the mesh's device: CPUOffloadPolicy keeps shards
    elsewhere."""
    from torch.distributed.tensor import DTensor

    mesh, options = parameter.device_mesh, {}
    if values.shape == local_part(parameter).shape and not isinstance(local_part(parameter), QuantizedTensor):
        options = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(values.to(mesh.device_type), mesh, placements, run_check=False, **options)


def _sharded_fields(name: str, parameter: Any, local: QuantizedTensor) -> dict[str, tuple[Any, tuple[int, int] | None]]:
    """Return the stored fields of a quantized parameter, each sharded as it is and padded to equal shards, with the
    dimension along which it is padded and the entries of the whole."""
    from torch.distributed.tensor import Shard

    mesh: Any = parameter.device_mesh
    each = largest_shard(parameter, parameter.shape[0], mesh.size(mesh.ndim - 1))
    if local.shape[1:] != parameter.shape[1:]:
        raise ValueError(f"{name} is quantized and has shards along another dimension than the first")
    if is_one_matrix(local) and one_per_matrix(local):
        check_scales_are_shared(local, mesh.get_group(mesh.ndim - 1))
    found: dict[str, tuple[Any, tuple[int, int] | None]] = {}
    for layout in local.layouts:
        field, (dim, _) = padded_field(local, layout, each), entries_of_rows(local, layout, each)
        if dim is None:  # a number that all shards share
            found[layout.name] = field, None
            continue
        placements = [Shard(dim) if hasattr(p, "dim") else p for p in parameter.placements]
        values = field.view(torch.uint8) if field.dtype.itemsize == 1 else field
        entries = dim, entries_of_rows(local, layout, parameter.shape[0])[1]
        found[layout.name] = _sharded(parameter, values, placements), entries
    return found
