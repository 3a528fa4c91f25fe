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

from ..config import ConfigError

if TYPE_CHECKING:
    from .mesh import ParallelMesh

REST = -1
"""A size that is what the other sizes leave of the ranks."""


def check_sizes(sizes: Mapping[str, int | None], prefix: str = "") -> None:
    """Raise ConfigError naming the first size that no number of ranks could make right. prefix: of the names."""
    for name, size in sizes.items():
        where = prefix + name
        rest = name == "data_parallel_shard_size"
        if size is None:
            continue
        if size < 1 and not (rest and size == REST):
            also = f", or {REST} for all ranks that are left" if rest else ""
            raise ConfigError(f"{where} is {size}; allowed: a positive integer{also}", where)


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
        check_sizes(self.sizes())
        if self.ranks < 1:
            raise ConfigError(f"ranks is {self.ranks}; allowed: a positive integer", "ranks")
        left = self._left("pipeline_model_parallel_size", self.pipeline_model_parallel_size, self.ranks)
        left = self._left("tensor_model_parallel_size", self.tensor_model_parallel_size, left)
        left = self._left("context_parallel_size", self.context_parallel_size, left)
        shard, replicate = self.data_parallel_shard_size, self.data_parallel_replicate_size
        if shard == REST:
            replicate = 1 if replicate is None else replicate
            shard = self._left("data_parallel_replicate_size", replicate, left)
        else:
            over = self._left("data_parallel_shard_size", shard, left)
            replicate = over if replicate is None else replicate
            if replicate != over:
                raise ConfigError(
                    f"data_parallel_replicate_size is {replicate}; allowed: {over}, which the other sizes leave of "
                    f"{self.ranks} ranks",
                    "data_parallel_replicate_size",
                )
        filled = {"data_parallel_shard_size": shard, "data_parallel_replicate_size": replicate}
        if self.expert_tensor_parallel_size is None:
            filled["expert_tensor_parallel_size"] = self.tensor_model_parallel_size
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        self._check_experts()

    def _check_experts(self) -> None:
        ep, etp, over = self.expert_model_parallel_size, self.expert_tensor_parallel_size, self.expert_ranks
        assert etp is not None, "filled in"
        what = "data_parallel_shard_size" if self.data_parallel_shard_size > 1 else "data_parallel_replicate_size"
        what += " x context_parallel_size" if self.context_parallel_size > 1 else ""
        apart = self.splits_experts_apart
        what += " x tensor_model_parallel_size" if apart and self.tensor_model_parallel_size > 1 else ""
        if apart and over % etp:
            where = "expert_tensor_parallel_size"
            raise ConfigError(f"{where} is {etp}; allowed: a divisor of {what}, {over}", where)
        left = over // etp if apart else over
        if left % ep:
            what += f" / expert_tensor_parallel_size, {left}" if left != over else f", {over}"
            where = "expert_model_parallel_size"
            raise ConfigError(f"{where} is {ep}; allowed: a divisor of {what}", where)

    def _left(self, name: str, size: int, ranks: int) -> int:
        """Return how many ranks are left when each group of `size` counts as one."""
        if ranks % size:
            raise ConfigError(f"{name} is {size}; allowed: a divisor of the number of ranks, {ranks}", name)
        return ranks // size

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
