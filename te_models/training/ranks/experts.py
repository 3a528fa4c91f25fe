"""Experts that are distributed over ranks: whose gradients are summed, what a norm counts, what a checkpoint holds.

With experts over n of the ranks, consecutive ranks r n to r n + n - 1 share one copy of the experts, and rank i of each
such row has the same experts: its copies. Everything else of the model is on every rank. What the layers compute is
`te_models.layers.distributed.expert_parallel`; a backward pass gives the gradients of the sum of a row's losses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ...config import ConfigError
from .data_parallel import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """parameters: this rank's experts. group: the ranks that share a copy of all experts; copies: those that have the
    same ones."""

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup
    copies: dist.ProcessGroup

    @property
    def saves(self) -> bool:
        """Whether this rank's experts are those that go into checkpoints, those of the first copy."""
        return self.copies.rank() == 0

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one of the experts'."""
        return id(parameter) in self._ids

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.parameters))

    def norm(self, norms: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the norm of a vector over the ranks of a copy, from the norms of this rank's parts of it."""
        total = torch.zeros((), dtype=torch.float64, device=self.parameters[0].device)  # whose squares do not overflow
        for norm in norms:
            total += norm.double().square()
        dist.all_reduce(total, group=self.group)
        return total.sqrt().float()

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts of a copy's ranks one behind the other, in main memory; on the other ranks than the first
        what they gave. Scalars are the same on every rank."""
        if part.dim() == 0:
            return part
        sent = part.contiguous().flatten().view(torch.uint8)
        first = self.group.rank() == 0
        parts = [torch.empty_like(sent) for _ in range(self.group.size())] if first else None
        dist.gather(sent, parts, group=self.group, group_dst=0)
        if parts is None:
            return part
        return torch.cat([p.cpu() for p in parts]).view(part.dtype).view(-1, *part.shape[1:])

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Undo `whole`."""
        return whole.chunk(self.group.size())[self.group.rank()] if whole.dim() else whole


def expert_mesh(size: int, ranks: Ranks, device: str) -> DeviceMesh | None:
    """Return the ranks as a mesh of the dimensions "copies" and "ep", of `size`; None where each rank has all experts.

    Raises ConfigError where the ranks are no multiple of `size`.
    """
    if ranks.world_size % size:
        raise ConfigError(
            f"expert_model_parallel_size is {size}; allowed: a divisor of the number of ranks, {ranks.world_size}"
        )
    if size == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (ranks.world_size // size, size), mesh_dim_names=("copies", "ep"))


def expert_ranks(parameters: Iterable[nn.Parameter], mesh: DeviceMesh | None) -> ExpertRanks | None:
    """Return what the mesh says of a model's `expert_parameters`."""
    if mesh is None:
        return None
    return ExpertRanks(tuple(parameters), mesh.get_group("ep"), mesh.get_group("copies"))
