"""Process groups by name, as layers and models keep them so that they can be copied, and who belongs to one."""

from __future__ import annotations

import torch.distributed as dist


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of a name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def check_member(name: str, group: dist.ProcessGroup) -> None:
    """Raise ValueError where `group`, the argument of this name, is one of other ranks."""
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name} does not contain this rank, {dist.get_rank()}; allowed: a group that does")
