"""The sizes of a layout: over how many ranks each kind of parallelism splits, checked against the number of ranks.

Ranks are numbered with tensor parallelism innermost: rank = (((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp +
t. Ranks that share a sequence count as data parallel in everything but the data: gradients are averaged over them, and
parameters sharded. Experts are distributed over consecutive such ranks, as Megatron-Core and torchtitan count them:
over a part of dp_shard x cp where parameters are sharded, of dp_replicate x cp where they are not. Where experts are
split over another number of ranks (etp) than the other layers, they are distributed over the ranks of these times tp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ..layouts import REST, Facts, check_layout_rules

if TYPE_CHECKING:
    from .mesh import ParallelMesh


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The layout of `ranks` ranks. Sizes that were left open are filled in.

    data_parallel_replicate_size: copies of the model (DDP, or HSDP with a shard size); None: as many as the other sizes
    leave. data_parallel_shard_size: ranks over which FSDP2 shards each copy; 1: none, -1: all ranks that are left.
    expert_model_parallel_size: data-parallel ranks that share the experts of a copy. expert_tensor_parallel_size: ranks
    over which each expert is split; None: tensor_model_parallel_size, where another number means that the ranks that
    split the other layers share the tokens of the experts, and count as ranks that these are distributed over.
    pipeline_model_parallel_size: ranks over which the layers of a copy are distributed, as pipeline stages.
    context_parallel_size: ranks that share each sequence.

    Raises ConfigError naming the size that does not divide the ranks, and for what is not implemented.

    Example:
        dims = ParallelDims(ranks=8, data_parallel_shard_size=-1, tensor_model_parallel_size=2)
        assert dims.data_parallel_shard_size == 4
    """

    ranks: int
    data_parallel_replicate_size: int | None = None
    data_parallel_shard_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None

    def __post_init__(self) -> None:
        check_layout_rules(Facts(dims=self))
        left = self.ranks // self.pipeline_model_parallel_size // self.tensor_model_parallel_size
        left //= self.context_parallel_size
        shard, replicate = self.data_parallel_shard_size, self.data_parallel_replicate_size
        if shard == REST:
            replicate = replicate or 1
            shard = left // replicate
        filled = {"data_parallel_shard_size": shard, "data_parallel_replicate_size": replicate or left // shard}
        filled["expert_tensor_parallel_size"] = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        check_layout_rules(Facts(dims=self))

    @classmethod
    def of(cls, sizes: Mapping[str, Any], ranks: int) -> Self:
        """Return the layout of a table of sizes, of which others than this class's do not count."""
        return cls(ranks=ranks, **{name: sizes[name] for name in cls.names() if name in sizes})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the sizes."""
        return tuple(name for name in cls.__dataclass_fields__ if name != "ranks")

    def sizes(self) -> dict[str, int | None]:
        """Return the sizes by name."""
        return {name: getattr(self, name) for name in self.names()}

    @property
    def is_complete(self) -> bool:
        """Whether the sizes that were left open are filled in."""
        return None not in self.sizes().values() and self.data_parallel_shard_size != REST

    @property
    def data_ranks(self) -> int:
        """How many ranks read different windows: the others read the windows of one of these."""
        assert self.data_parallel_replicate_size is not None, "filled in"
        return self.data_parallel_replicate_size * self.data_parallel_shard_size

    @property
    def expert_ranks(self) -> int:
        """How many ranks the experts, and the parts of each where they are split apart, can be distributed over at
        most."""
        assert self.data_parallel_replicate_size is not None, "filled in"
        shard = self.data_parallel_shard_size
        ranks = (shard if shard > 1 else self.data_parallel_replicate_size) * self.context_parallel_size
        return ranks * self.tensor_model_parallel_size if self.splits_experts_apart else ranks

    @property
    def splits_experts_apart(self) -> bool:
        """Whether each expert is split over other ranks than the other layers."""
        return self.expert_tensor_parallel_size != self.tensor_model_parallel_size

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the parameters."""
        return self.data_parallel_shard_size > 1

    @property
    def is_whole(self) -> bool:
        """Whether every rank has the whole model, at most without a part of the experts."""
        split = self.tensor_model_parallel_size, self.expert_tensor_parallel_size, self.pipeline_model_parallel_size
        return not self.is_sharded and split == (1, 1, 1)

    def build_mesh(self, device_type: str) -> ParallelMesh:
        """Return the device mesh of this layout, called by all ranks of the default process group.

        device_type: "cpu" or "cuda". Raises ValueError where the process group has another number of ranks.
        """
        from .mesh import build_mesh

        return build_mesh(self, device_type)
