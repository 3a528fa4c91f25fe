"""The device mesh of a layout and its views: the same ranks, named for dense layers, for experts and for data."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .dims import ParallelDims


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """The ranks of a layout as meshes of the same rank order.

    layers: dimensions pp, dp_replicate, dp_shard, cp, tp. experts: pp, dp_replicate, fsdp, ep, tp, where ep are the
    ranks that share the experts of a copy, fsdp those over which each of their parts is sharded, and tp those that
    split each expert (its size is etp); None where each rank has all experts. data: pp, dp, tp, where dp are the ranks
    with data of their own; None where these are a dimension of `layers`.
    """

    dims: ParallelDims
    layers: DeviceMesh
    experts: DeviceMesh | None
    data: DeviceMesh | None

    @property
    def model(self) -> DeviceMesh | None:
        """The dimensions over which a model is built, "ep" and "tp", as `GPTModel.from_pretrained(device_mesh=)` takes
        them; None where each rank builds all of it."""
        split = self.dims.tensor_model_parallel_size > 1
        if self.experts is not None:
            return self.experts["ep", "tp"] if split else self.experts["ep"]
        return self.layers["tp"] if split else None

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards what is no expert: dp_shard, or (dp_replicate, dp_shard) where there are
        several copies."""
        return _with_copies(self.layers, "dp_shard")

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards the experts that a rank has."""
        return self.fsdp if self.experts is None else _with_copies(self.experts, "fsdp")

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks with data of their own, this one or one that reads the same among them."""
        if self.data is not None:
            return self.data.get_group("dp")
        return self.layers.get_group("dp_shard" if self.dims.is_sharded else "dp_replicate")


def _with_copies(mesh: DeviceMesh, shards: str) -> DeviceMesh:
    return mesh["dp_replicate", shards] if mesh["dp_replicate"].size() > 1 else mesh[shards]


def build_mesh(dims: ParallelDims, device_type: str) -> ParallelMesh:
    """See `ParallelDims.build_mesh`. Of one layout there is one mesh, as long as there is the default process group."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != dims.ranks:
        found = dist.get_world_size() if dist.is_available() and dist.is_initialized() else "none"
        raise ValueError(f"the layout has {dims.ranks} ranks, and the default process group {found}; allowed: as many")
    if not _made or _made[0][0] is not dist.group.WORLD:
        _made[:] = [(dist.group.WORLD, {})]
    meshes = _made[0][1]
    if (dims, device_type) not in meshes:
        meshes[dims, device_type] = _new_mesh(dims, device_type)
    return meshes[dims, device_type]


_made: list[tuple[object, dict[tuple[ParallelDims, str], ParallelMesh]]] = []
"""The default process group, and the meshes made of it. Each has process groups, with threads and connections, which
cannot end before the default group does: torch keeps meshes that it has seen, and takes an equal one for the same."""


def _new_mesh(dims: ParallelDims, device_type: str) -> ParallelMesh:
    replicate, shard = dims.data_parallel_replicate_size, dims.data_parallel_shard_size
    tp, ep = dims.tensor_model_parallel_size, dims.expert_model_parallel_size
    assert replicate is not None, "filled in"

    def mesh(**sizes: int) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    experts = data = None
    if ep > 1:
        copies, fsdp = (replicate, shard // ep) if dims.is_sharded else (replicate // ep, 1)
        experts = mesh(pp=1, dp_replicate=copies, fsdp=fsdp, ep=ep, tp=tp)
    if replicate > 1 and shard > 1:
        data = mesh(pp=1, dp=replicate * shard, tp=tp)
    return ParallelMesh(dims, mesh(pp=1, dp_replicate=replicate, dp_shard=shard, cp=1, tp=tp), experts, data)
