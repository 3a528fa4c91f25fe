"""The layout of a run: its ranks as a mesh, and the ranks that have data of their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...parallel.dims import ParallelDims
from ..config import ParallelConfig
from .data_parallel import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...parallel.mesh import ParallelMesh


@dataclass(frozen=True, eq=False)
class Layout:
    """mesh: None where every rank has the whole model, and only data differ. data: this rank's place among those whose
    windows differ; ranks that split layers with it read the same ones."""

    dims: ParallelDims
    mesh: ParallelMesh | None
    data: Ranks

    @property
    def model_mesh(self) -> DeviceMesh | None:
        """The dimensions over which the model is built; None where each rank builds all of it."""
        return None if self.mesh is None else self.mesh.model


ONE_RANK = Layout(ParallelDims(ranks=1), None, Ranks())


def layout_of(config: ParallelConfig, ranks: Ranks, device: str) -> Layout:
    """Return the layout that a configuration describes for so many ranks; called by all of them.

    Raises ConfigError, naming the size, where the ranks cannot be divided so.
    """
    dims = ParallelDims.of(config.to_dict(), ranks.world_size)
    if dims.is_whole and dims.expert_model_parallel_size == 1:
        return Layout(dims, None, ranks)
    mesh = dims.build_mesh(device)
    group = mesh.data_group
    place = {"rank": group.rank(), "world_size": group.size(), "group": group, "owns_group": False}
    return Layout(dims, mesh, dataclasses.replace(ranks, **place))
