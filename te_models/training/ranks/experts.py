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

if TYPE_CHECKING:
    from ...parallel.mesh import ParallelMesh


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """parameters: this rank's experts. group: the ranks that share a copy of all experts; copies: those that have the
    same ones. token_shares: how many times the tokens of a rank its experts get, were traffic balanced: n, or n etp
    / tp where the ranks that split the other layers share the tokens of the experts."""

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup
    copies: dist.ProcessGroup
    token_shares: float

    @property
    def saves(self) -> bool:
        """Whether this rank's experts go into checkpoints: it holds the first copy."""
        return self.copies.rank() == 0

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one of the experts'."""
        return id(parameter) in self._ids

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.parameters))

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


def expert_ranks(parameters: Iterable[nn.Parameter], mesh: ParallelMesh | None) -> ExpertRanks | None:
    """Return what the mesh says of a model's `expert_parameters`; None where each rank has all experts."""
    if mesh is None or mesh.experts is None:
        return None
    dims, group = mesh.dims, mesh.experts.get_group("ep")
    assert dims.expert_tensor_parallel_size is not None, "a mesh is of dimensions that are filled in"
    assert mesh.same_experts is not None, "experts are distributed"
    share = dims.expert_tensor_parallel_size / dims.tensor_model_parallel_size
    return ExpertRanks(tuple(parameters), group, mesh.same_experts, group.size() * share)
