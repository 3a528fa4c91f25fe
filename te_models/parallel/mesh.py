"""The device mesh of a layout and its views: the same ranks, named for dense layers, for experts and for data."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .dims import ParallelDims


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """The ranks of a layout as meshes of the same rank order.

    layers: dimensions pp, dp_replicate, dp_shard, cp, tp. experts: pp, dp_replicate, fsdp, ep, tp, where ep are the
    ranks that share the experts of a copy, fsdp those over which each of their parts is sharded, and tp those that
    split each expert, called etp where other ranks split the other layers; None where each rank has all experts. data:
    pp, dp, tp, where dp are the ranks over which gradients are averaged, ranks with different data, and ranks that
    share their sequences; None where these are a dimension of `layers`. shards: pp, dp_replicate, dp_shard_cp, tp,
    where dp_shard_cp are the ranks over which FSDP2 shards what is no expert; None where these are dp_shard.
    layer_ranks: pp, stage, where stage are the ranks that have the same layers; None where all have. expert_copies: pp,
    same, ep, tp or etp, where same are the ranks that have the same experts, or shards of them; None where these are
    a dimension of `experts`.
    """

    dims: ParallelDims
    layers: DeviceMesh
    experts: DeviceMesh | None
    data: DeviceMesh | None
    shards: DeviceMesh | None
    layer_ranks: DeviceMesh | None
    expert_copies: DeviceMesh | None = None

    @property
    def model(self) -> DeviceMesh | None:
        """The dimensions over which a model is built, "ep" and "tp" or "etp", as
        `GPTModel.from_pretrained(device_mesh=)` takes them; None where each rank builds all of it. ValueError where
        these are of two meshes: pass the ParallelMesh itself."""
        split = self.dims.tensor_model_parallel_size > 1
        if self.dims.splits_experts_apart:
            if split:
                raise ValueError(
                    "the layers are split over other ranks than the experts, which no mesh has as dimensions; "
                    "allowed: device_mesh = the ParallelMesh"
                )
            assert self.experts is not None
            return self.experts["ep", "etp"]
        if self.experts is not None:
            return self.experts["ep", "tp"] if split else self.experts["ep"]
        return self.layers["tp"] if split else None

    @property
    def model_groups(self) -> dict[str, dist.ProcessGroup]:
        """The groups over which a model is built, as arguments of `GPTModel`."""
        meshes = {"tp": self.layers, "ep": self.experts, "etp": self.experts}
        sizes = {"tp": self.dims.tensor_model_parallel_size > 1, "ep": self.experts is not None}
        sizes["etp"] = self.dims.splits_experts_apart
        return {f"{dim}_group": mesh.get_group(dim) for dim, mesh in meshes.items() if mesh is not None and sizes[dim]}

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards what is no expert: dp_shard, with cp where ranks share sequences, or
        (dp_replicate, dp_shard) where there are several copies."""
        if self.shards is not None:
            return _with_copies(self.shards, "dp_shard_cp")
        return _with_copies(self.layers, "dp_shard")

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards the experts that a rank has."""
        return self.fsdp if self.experts is None else _with_copies(self.experts, "fsdp")

    @property
    def stages(self) -> dist.ProcessGroup | None:
        """The ranks with the other pipeline stages of this copy; None where each rank has all layers."""
        return self.layers.get_group("pp") if self.dims.pipeline_model_parallel_size > 1 else None

    @property
    def same_layers(self) -> dist.ProcessGroup | None:
        """The ranks that have the same layers; None where all have."""
        return None if self.layer_ranks is None else self.layer_ranks.get_group("stage")

    @property
    def same_experts(self) -> dist.ProcessGroup | None:
        """The ranks that have the same experts, or shards of them; None where each rank has all experts."""
        if self.expert_copies is not None:
            return self.expert_copies.get_group("same")
        if self.experts is None:
            return None
        return self.experts.get_group("fsdp" if self.experts["fsdp"].size() > 1 else "dp_replicate")

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks over which gradients are averaged: ranks with different data, or with parts of the same
        sequences."""
        if self.data is not None:
            return self.data.get_group("dp")
        if self.dims.data_ranks == 1:
            return self.layers.get_group("cp")
        return self.layers.get_group("dp_shard" if self.dims.is_sharded else "dp_replicate")

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share each sequence; None where there is one."""
        return self.layers.get_group("cp") if self.dims.context_parallel_size > 1 else None


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
"""The default process group, and the meshes made of it. Each has process groups, with threads and connections that
cannot end before the default group does: torch keeps meshes that it has seen, and takes an equal one for the same."""


def _new_mesh(dims: ParallelDims, device_type: str) -> ParallelMesh:
    replicate, shard = dims.data_parallel_replicate_size, dims.data_parallel_shard_size
    tp, ep, pp = dims.tensor_model_parallel_size, dims.expert_model_parallel_size, dims.pipeline_model_parallel_size
    cp, etp = dims.context_parallel_size, dims.expert_tensor_parallel_size
    assert replicate is not None and etp is not None, "filled in"

    def mesh(**sizes: int) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    experts = data = shards = expert_copies = None
    if ep > 1 or dims.splits_experts_apart:
        split = {"etp": etp} if dims.splits_experts_apart else {"tp": tp}
        same = dims.expert_ranks // (ep * etp if dims.splits_experts_apart else ep)
        copies, fsdp = (replicate, same) if dims.is_sharded else (same, 1)
        experts = mesh(pp=pp, dp_replicate=copies, fsdp=fsdp, ep=ep, **split)
        if copies > 1 and fsdp > 1:
            expert_copies = mesh(pp=pp, same=same * replicate, ep=ep, **split)
    if sum(size > 1 for size in (replicate, shard, cp)) > 1:
        data = mesh(pp=pp, dp=replicate * shard * cp, tp=tp)
    if dims.is_sharded and cp > 1:
        shards = mesh(pp=pp, dp_replicate=replicate, dp_shard_cp=shard * cp, tp=tp)
    layers = mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
    same_layers = mesh(pp=pp, stage=dims.ranks // pp) if pp > 1 else None
    return ParallelMesh(dims, layers, experts, data, shards, same_layers, expert_copies)
