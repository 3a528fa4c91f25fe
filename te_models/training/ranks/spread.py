"""How evenly the ranks work: the time of each in a step, its wait for data and its memory, as extremes over ranks."""

from __future__ import annotations

import resource
import sys

import torch

from .data_parallel import Ranks, largest_over_ranks


def peak_memory(device: str) -> int:
    """Return the most memory that this process has taken, in bytes: of the device that tensors are on, or of CPUs the
    resident set."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def spread_over_ranks(seconds: float, data_s: float, device: str, ranks: Ranks) -> dict[str, float | int]:
    """Return a step's columns of the metrics; called by all ranks, once a step, after what waits for the device anyway.

    seconds, data_s: what this rank took for the step, and of it for reading the data. The result has the largest
    `data_s` and `peak_memory` (bytes) of a rank, and of several ranks the shortest and the longest step, `step_s_min`
    and `step_s_max`."""
    own = torch.tensor([data_s, peak_memory(device), seconds, -seconds], dtype=torch.float64, device="cpu")
    data, memory, longest, shortest = largest_over_ranks(own, ranks).tolist()
    found: dict[str, float | int] = {"data_s": data, "peak_memory": int(memory)}
    if ranks.world_size > 1:
        found |= {"step_s_min": -shortest, "step_s_max": longest}
    return found
