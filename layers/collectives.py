"""Process groups by name, and collectives along the first dimension that stay inside a compiled graph.

group: a process group or its name. Layers and models keep groups by name, so that they can be copied.
"""

from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from te_models.kernels.torch_versions import constant_when_traced

# torch 2.13 has new names for them, and warns of the old ones
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of a name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


@constant_when_traced
def group_of_all() -> str | None:
    """Return the name of the default process group; None without a group, or with a group of one rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def check_group(name: str, group: object) -> None:
    """Raise ValueError where the argument of this name is no process group, say a whole device mesh: which of its
    dimensions is meant is the caller's to say."""
    if isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    names = getattr(group, "mesh_dim_names", None) or ("tp",)
    of_mesh = f", such as get_group({names[0]!r}) of a device mesh"
    raise ValueError(f"{name} is a {type(group).__name__}; allowed: a process group{of_mesh}")


def ranks_of(name: str, group: dist.ProcessGroup) -> int:
    """Return how many ranks the argument of this name has. ValueError where it is no process group."""
    check_group(name, group)
    return dist.get_world_size(group)


def check_member(name: str, group: dist.ProcessGroup) -> None:
    """Raise ValueError where `group`, the argument of this name, is no process group, or one of other ranks."""
    check_group(name, group)
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name} does not contain this rank, {dist.get_rank()}; allowed: a group that does")


def all_gather(x: Tensor, group: Any) -> Tensor:
    """[T, ...] of each rank -> [ranks T, ...], in rank order."""
    return waited(_all_gather(x.contiguous(), 0, group))


def reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """[ranks T, ...] -> this rank's part [T, ...] of the sum over ranks."""
    return waited(_reduce_scatter(x.contiguous(), "sum", 0, group))


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks, on every rank."""
    return waited(functional.all_reduce(x.contiguous(), "sum", group))


def all_to_all(x: Tensor, group: Any, receive: list[int] | None = None, send: list[int] | None = None) -> Tensor:
    """[sum of send, ...] -> [sum of receive, ...]: the first send[0] rows go to the first rank, and so on; what the
    ranks sent comes in rank order. None: each rank gets an equal share."""
    return waited(functional.all_to_all_single(x.contiguous(), receive, send, group))


def started_all_to_all(x: Tensor, group: Any, receive: list[int], send: list[int]) -> Tensor:
    """As `all_to_all` in eager code, and return at once: to be read behind `waited`, which is to be called once."""
    return functional.all_to_all_single(x.contiguous(), receive, send, group)


def sent_on(x: Tensor, group: Any, rank: int, ranks: int) -> Tensor:
    """Send x [T, ...] to the next rank of a ring, and return what comes from the one before, of the same shape: to be
    read behind `waited`, which is to be called once, and may be called when something else has been computed."""
    send, receive = [0] * ranks, [0] * ranks
    send[(rank + 1) % ranks] = receive[rank - 1] = x.shape[0]
    return started_all_to_all(x, group, receive, send)


def waited(x: Tensor) -> Tensor:
    """Return the result of a collective when it has arrived. In a graph, torch has put the wait behind the collective
    already; after a second one the compiler would not see that a matrix product follows the collective."""
    return functional.wait_tensor(x) if isinstance(x, functional.AsyncCollectiveTensor) else x
