"""Matrices that ranks have in parts, put together for Muon, because it needs all of a matrix at once.

FSDP2 and tensor parallelism cut within matrices; the ranks of a copy each put the whole matrix together, all compute
the same from it, and each keeps its own part. Whole experts are never moved: each is a separate matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.layers.tensor.fsdp import largest_shard, local_part

if TYPE_CHECKING:
    from te_models.checkpoints.mapping.rank_shards import Cuts

    from ...parallel.parts import ModelParts

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DividedMatrix:
    """A parameter [m, n], or a stack [num_gemms, m, n], of which this rank has a part of each matrix.

    parameter: this rank's. group: the ranks that split it by tensor parallelism, None: none do; cuts: the part of each
    of them, of `shape`, the parameter's before FSDP2 sharded it and before it was split. Of a stack, shape has this
    rank's experts.
    """

    parameter: Tensor
    shape: Shape
    group: dist.ProcessGroup | None
    cuts: tuple[Cuts, ...]

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole matrices from this rank's part of them. Collective."""
        whole = self._with_shards(part)
        if self.group is None:
            return whole
        parts = [torch.empty_like(whole) for _ in self.cuts]
        dist.all_gather(parts, whole.contiguous(), group=self.group)
        found = whole.new_empty(self.shape if whole.dim() == 2 else (whole.shape[0], *self.shape[1:]))
        for cuts, own in zip(self.cuts, parts, strict=True):
            for dim, ranges in cuts.items():
                offset = 0
                for begin, end in ranges:
                    found.narrow(dim, begin, end - begin).copy_(own.narrow(dim, offset, end - begin))
                    offset += end - begin
        return found

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of whole matrices."""
        if self.group is not None:
            for dim, ranges in self.cuts[self.group.rank()].items():
                whole = torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in ranges], dim)
        return own_shard(self.parameter, whole) if _has_parts(self.parameter) else whole

    def _with_shards(self, part: Tensor) -> Tensor:
        sharded: Any = self.parameter
        if not _has_parts(sharded):
            return part
        from torch.distributed.tensor import DTensor

        options = {"shape": sharded.shape, "stride": sharded.stride(), "run_check": False}
        return DTensor.from_local(part, sharded.device_mesh, sharded.placements, **options).full_tensor()


def own_shard(parameter: Any, whole: Tensor) -> Tensor:
    """Return this rank's shard of `whole`, cut as FSDP2 cuts a parameter; all of it where that is not."""
    if local_part(parameter) is parameter:
        return whole
    mesh, dim = parameter.device_mesh, parameter.placements[-1].dim
    each = largest_shard(parameter, whole.shape[dim], mesh.size(mesh.ndim - 1))
    begin = min(each * mesh.get_local_rank(mesh.ndim - 1), whole.shape[dim])
    return whole.narrow(dim, begin, min(each, whole.shape[dim] - begin))


def _has_parts(parameter: Any) -> bool:
    """Whether FSDP2 shards a parameter, and within its matrices, not a stack between them."""
    return local_part(parameter) is not parameter and (parameter.dim() == 2 or parameter.placements[-1].dim > 0)


def divided_matrices(parts: ModelParts, *, frozen: bool = False) -> dict[str, DividedMatrix]:
    """Return what of a model's trainable parameters ranks have parts of matrices of, by name. frozen: and of others."""
    found: dict[str, DividedMatrix] = {}
    for name, parameter in parts.model.named_parameters():
        if not (frozen or parameter.requires_grad) or parameter.dim() not in (2, 3):
            continue
        group, owned = parts.split_group(name), parts.of_split_ranks(name)
        split = group is not None and owned[0].dim is not None
        if split or _has_parts(parameter):
            cuts: list[Cuts] = [{} if its.dim is None else {its.dim: its.ranges} for its in owned]
            shape = list(parameter.shape)
            if split:
                dim = next(iter(cuts[0]))
                shape[dim] = parts.shape(name)[dim]
            found[name] = DividedMatrix(parameter, tuple(shape), group if split else None, tuple(cuts))
    return found
