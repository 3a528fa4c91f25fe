"""How GPU time is measured: events around single calls, sides in turn, the L2 cache flushed before each, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .case import Run

_CACHE = 256 << 20  # bytes, more than any L2
_CYCLES = 2_000_000  # about a millisecond


class Timer(Protocol):
    """Time one call, in seconds."""

    def __call__(self, run: Run) -> float: ...


class CudaTimer:
    """Events on the current stream. The device idles for a millisecond first, in which the host gets ahead of it, so
    that a few launches are not timed; what a side needs beyond that on the host is."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(_CACHE, dtype=torch.uint8, device=device)

    def __call__(self, run: Run) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.fill_(1)
        torch.cuda._sleep(_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class Budget:
    """The seconds that the whole run may take."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self._clock = seconds, clock
        self._begun = clock()

    @property
    def used(self) -> float:
        return self._clock() - self._begun

    def exhausted(self, reserve: float) -> str | None:
        """Return why nothing new starts, None where `reserve` seconds are left."""
        if self.used + reserve <= self.seconds:
            return None
        return f"{self.used:.0f} of {self.seconds:.0f} seconds are used, and this may take {reserve:.0f}"


def measure(sides: dict[str, Run], timer: Timer, *, seconds: float = 1.0) -> dict[str, float]:
    """Return each side's median time. Rounds: as many as fit in `seconds`, 5 to 50, after two that do not count."""
    for run in sides.values():
        timer(run)
    once = sum(timer(run) for run in sides.values())
    rounds = max(5, min(50, int(seconds / max(once, 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            times[name].append(timer(run))
    return {name: statistics.median(values) for name, values in times.items()}


def ceilings(device: torch.device, timer: Timer, *, megabytes: int = 1024, size: int = 8192) -> dict[str, Any]:
    """Measure what other numbers are set against: a copy (read and written bytes) and a bf16 matrix product."""
    x = torch.randn(megabytes << 19, dtype=torch.bfloat16, device=device)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    y = torch.empty_like(x)
    times = measure({"copy": lambda: y.copy_(x), "matmul": lambda: a @ b}, timer)
    return {
        "copy_bytes_per_s": 2 * x.numel() * x.element_size() / times["copy"],
        "bf16_flop_per_s": 2 * size**3 / times["matmul"],
        "what": f"copy of {megabytes} MiB, read and written; bf16 matrix product of {size}^3",
    }
