"""Saving a model that is split over ranks: the others send the first one their parts of a tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.layers import QuantizedTensor

from ..parallel import place_of
from .collected_saving import Collection, save_collected

if TYPE_CHECKING:
    from te_models.checkpoints.plan.rank_shards import Cuts, RankPart

    from ..gpt import GPTModel


def save_split(
    model: GPTModel,
    folder: str | os.PathLike[str],
    source_dir: str | os.PathLike[str] | None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a split model; called by all of its ranks. Quantized weights are put together as they are.

    Raises CheckpointError on every rank where a matrix is split whose format has one number per matrix, and the ranks
    have different ones, and as `save_collected` does.
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
            if rank > 0:
                sent = torch.empty_like(sent)
                dist.recv(sent, group=self.group, group_src=rank)
            part, offset = sent.view(own.dtype).view(own.shape), 0
            for begin, end in its[self.dim]:
                size = end - begin
                whole.narrow(self.dim, begin, size).copy_(part.narrow(self.dim, offset, size))
                offset += size
        return whole


@dataclass(frozen=True)
class _Entry:
    """One tensor of the files: what this rank has of it, and how it is shared, by tensor parallelism first."""

    parameter: str
    own: Tensor
    tp: _Split | None
    ep: _Split | None
    one_number: bool
    """The parameter is split, and this number of it goes with every part."""


class _Parts(Collection):
    """This rank's parts of a model, by the names that they have in files, and how they become the whole."""

    def __init__(self, model: GPTModel) -> None:
        from te_models.checkpoints import expected_tensors
        from te_models.checkpoints.plan.rank_shards import Place, parts

        place, self._shapes = place_of(model), expected_tensors(model.config, model.expert_layout)
        self.first, self._first_of_tp = place.tp_rank == place.ep_rank == 0, place.tp_rank == 0
        self._tp, self._ep = model.tp_group, model.ep_group
        tp = [Place(tp_rank=rank, tp_size=place.tp_size) for rank in range(place.tp_size)]
        ep = [Place(ep_rank=rank, ep_size=place.ep_size) for rank in range(place.ep_size)]
        owned = [[parts(model.config, self._shapes, one) for one in row] for row in (tp, ep)]
        self._tensors = {name: tensor.detach() for name, tensor in model.stored_tensors()}
        self._entries: dict[str, _Entry] = {}
        for name, tensor in self._tensors.items():
            by_tp, by_ep = ([its[name] for its in ranks] for ranks in owned)
            self._entries |= dict(self._entries_of(name, tensor, by_tp, by_ep))
        self.names = list(self._entries)
        self._device = self._entries[self.names[0]].own.device

    def _entries_of(
        self, name: str, tensor: Tensor, by_tp: list[RankPart], by_ep: list[RankPart]
    ) -> Iterator[tuple[str, _Entry]]:
        from te_models.checkpoints.plan.quantized_format import SUFFIXES

        if not isinstance(tensor, QuantizedTensor):
            tp, ep = ([part.cuts() for part in row] for row in (by_tp, by_ep))
            yield name, _Entry(name, tensor, _split(self._tp, tp), _split(self._ep, ep), one_number=False)
            return
        shape = self._shapes[name]
        fields = [[part.field_cuts(name, shape, tensor.quantizer) for part in row] for row in (by_tp, by_ep)]
        for field, own in tensor.fields.items():
            tp, ep = ([its[field] for its in row] for row in fields)
            shared = bool(by_tp[0].cuts()) and not tp[0]
            entry = _Entry(name, own, _split(self._tp, tp), _split(self._ep, ep), one_number=shared)
            yield name + SUFFIXES[field], entry

    def check_numbers(self) -> None:
        """Raise CheckpointError, on every rank of the model, where a number that goes with every part of a matrix is
        not the same on all of them."""
        from te_models.checkpoints import CheckpointError

        unlike = len(self.names)
        for number, entry in enumerate(self._entries.values()):
            if entry.one_number and self._tp is not None:
                own = entry.own.contiguous().flatten().view(torch.uint8)
                others = [torch.empty_like(own) for _ in range(self._tp.size())]
                dist.all_gather(others, own, group=self._tp)
                if not all(torch.equal(own, other) for other in others):
                    unlike = min(unlike, number)
        found = torch.tensor([unlike], device=self._device)
        for group in (self._tp, self._ep):
            if group is not None:
                dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
        if int(found) < len(self.names):
            parameter = self._entries[self.names[int(found)]].parameter
            raise CheckpointError(f"{parameter} is split over ranks that quantized it with scales of their own")

    def wholes(self) -> dict[str, Tensor]:
        """See `Collection`."""
        from te_models.checkpoints.plan.quantized_format import describe, empty

        found: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            shape = self._shapes[name]
            if isinstance(tensor, QuantizedTensor):
                found[name] = empty(name, shape, describe(tensor.quantizer, tensor.dtype), "meta")
            else:
                found[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return found

    def announce(self, number: int) -> int:
        """See `Collection`."""
        message = torch.tensor([number], device=self._device)
        if self._ep is not None and self._first_of_tp:
            dist.broadcast(message, group=self._ep, group_src=0)
        if self._tp is not None:
            dist.broadcast(message, group=self._tp, group_src=0)
        return int(message)

    @torch.no_grad()
    def collect(self, number: int) -> Tensor | None:
        """See `Collection`."""
        entry = self._entries[self.names[number]]
        found: Tensor | None = entry.own
        memory = torch.device("cpu")
        if entry.tp is not None:
            found = entry.tp.collect(entry.own, self._device if entry.ep is not None else memory)
        if entry.ep is not None and self._first_of_tp and found is not None:
            found = entry.ep.collect(found, memory)
        return None if found is None or not self.first else found.to(memory)


def _split(group: dist.ProcessGroup | None, cuts: list[Cuts]) -> _Split | None:
    return None if group is None or not cuts[0] else _Split(group, cuts)
