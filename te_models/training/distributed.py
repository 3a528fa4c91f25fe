"""Data parallelism over processes that torchrun started: which windows are mine, and the mean of everybody's gradients.

Every rank holds the whole model. Gradients are averaged in one all-reduce per dtype over a flat buffer, after the last
micro-batch; the reduction gives the same bits on every rank, so parameters never drift apart. Without torchrun's
environment there is one rank and nothing here communicates. (Sharded training with FSDP2 is a later concern.)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process's place. `rank` 0 writes files and shows progress."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    owns_group: bool = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def leave(self) -> None:
        """Leave the process group, if this run joined it and not its caller."""
        if self.owns_group:
            dist.destroy_process_group()


def is_main_process() -> bool:
    """Whether this process speaks for the run: torchrun's rank 0, or one that torchrun did not start."""
    return int(os.environ.get("RANK", "0")) == 0


def ranks_from_environment(device: str) -> Ranks:
    """Join the process group that torchrun described (RANK, WORLD_SIZE, MASTER_ADDR, ...); one rank without it."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return Ranks()
    owns_group = not dist.is_initialized()
    if owns_group:
        # numbers on the host, such as losses and random states, are exchanged, too
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")), owns_group)


def average_gradients(
    parameters: Iterable[torch.nn.Parameter], ranks: Ranks, *, distributed: Iterable[torch.nn.Parameter] = ()
) -> None:
    """Replace every gradient by its mean over the ranks. A parameter without a gradient must lack it on all of them.

    distributed: those of the parameters that only this rank has, as `GPTModel.expert_parameters` lists them. Their
    gradients are sums over all ranks already and are divided only.
    """
    if ranks.world_size == 1:
        return
    own = {id(parameter) for parameter in distributed}
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) in own:
            parameter.grad.div_(ranks.world_size)
        elif parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        flat.div_(ranks.world_size)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def mean_over_ranks(value: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return the mean of a scalar over the ranks."""
    if ranks.world_size > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= ranks.world_size
    return value


def gather_tensors(tensors: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return every rank's tensors under `{rank}.{name}`; all ranks give the same names and shapes."""
    result = {}
    for name, tensor in sorted(tensors.items()):
        parts = [torch.empty_like(tensor) for _ in range(ranks.world_size)] if ranks.world_size > 1 else [tensor]
        if ranks.world_size > 1:
            dist.all_gather(parts, tensor)
        result |= {f"{rank}.{name}": part for rank, part in enumerate(parts)}
    return result


def barrier(ranks: Ranks) -> None:
    """Wait until every rank is here."""
    if ranks.world_size > 1:
        dist.barrier()
