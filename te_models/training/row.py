"""The row of a step: what metrics.jsonl, the progress and every writer of metrics are told of it."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from te_models.layers import quantization_statistics

from ..model.moe.expert_bias import ExpertLoad
from ..terminal import say
from .metrics import finite
from .ranks.data_parallel import Ranks, largest_over_ranks
from .setup import SetUp
from .step import StepResult
from .trained import step_flops_per_token


@dataclass(frozen=True, kw_only=True)
class MetricRows:
    """What the rows of all steps have in common.

    Attributes:
        tflop_per_token: Model FLOPs of a rank for each token of a step, in 10^12.
        begun: The clock when the first step of this command began, in seconds.
    """

    run: SetUp
    device: str
    ranks: Ranks
    tflop_per_token: float
    stragglers: Stragglers = field(default_factory=lambda: Stragglers())
    begun: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, run: SetUp, device: str, ranks: Ranks) -> MetricRows:
        """Return the rows of a run, whose clock starts now."""
        flops = step_flops_per_token(run.config, run.model_config)
        return cls(run=run, device=device, ranks=ranks, tflop_per_token=flops / ranks.world_size / 1e12)

    def row(
        self,
        step: int,
        result: StepResult,
        lr: float,
        load: ExpertLoad | None,
        seconds: float,
        data_s: float,
        compute_s: float,
        windows: tuple[int, int],
        *,
        histograms: bool = False,
    ) -> dict[str, Any]:
        """Return the row of a finished step; called by all ranks.

        load: of the experts of all layers; None: there are none. seconds, data_s, compute_s: what this rank took for
        the step, and of it for reading the data, and for computing. windows: how many the step read, and all steps
        until now, on all ranks.
        histograms: whether the row has the tokens of each expert.
        """
        config, length = self.run.config, self.run.config.data.sequence_length * self.run.config.window_rows
        row: dict[str, Any] = {"step": step, "loss": result.loss, "aux_loss": result.aux_loss, "lr": lr}
        if self.run.model_config.mtp_num_layers:
            row["mtp_loss"] = result.mtp_loss / self.run.model_config.mtp_loss_scaling_factor
        if config.model.logits_z_loss_coeff:
            row["logits_z_loss"] = result.logits_z_loss
        row |= result.metrics
        row |= {
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "tokens": windows[1] * length,
        }
        row |= {"skipped": True} if result.skipped else {}
        row |= {"recipe": self.run.recipes.name} if self.run.recipes.several else {}
        if load is not None:
            layout = self.run.layout
            pp = layout.dims.pipeline_model_parallel_size
            repeated = self.ranks.world_size // (pp * layout.gradients.world_size)
            experts = load.metrics(repeated)
            row |= {"max_expert_load": max(experts["max_load"]), "experts": experts}
            row |= {"expert_tokens": (load.tokens // repeated).tolist()} if histograms else {}
        tokens = windows[0] * length
        row |= {"tokens_per_second": tokens / seconds, "seconds": time.perf_counter() - self.begun}
        row |= spread_over_ranks(seconds, data_s, self.device, self.ranks)
        if self.ranks.world_size > 1 and self.device == "cpu":
            row |= self.stragglers.step(compute_of_ranks(compute_s, self.ranks))
            if self.ranks.is_main and self.stragglers.news:
                say(f"note: {self.stragglers.news}")
        row["tflops"] = self.tflop_per_token * tokens / seconds
        if config.log.peak_tflops is not None:
            row["mfu"] = row["tflops"] / config.log.peak_tflops
        return row

    def quantization(self) -> dict[str, dict[str, float | None]]:
        """Return what the recipe did to the operands of the last step that noted it."""
        return finite(quantization_statistics(self.run.model))


def busy_seconds() -> float:
    """Return how long this thread has computed, or has waited for a processor to do so: not what it slept, as in a
    collective."""
    try:
        running, queued = Path("/proc/thread-self/schedstat").read_text().split()[:2]
    except (OSError, ValueError):  # no Linux
        return time.thread_time()
    return (int(running) + int(queued)) / 1e9


def compute_of_ranks(seconds: float, ranks: Ranks) -> list[float]:
    """Return what each rank computed; called by all ranks."""
    own = torch.zeros(ranks.world_size, dtype=torch.float64, device="cpu")
    own[ranks.rank] = seconds
    return largest_over_ranks(own, ranks).tolist()


@dataclass
class Stragglers:
    """Notices a rank that computes longer than the others, for which these wait in every collective. news: a sentence
    about one, after the step that makes it certain."""

    news: str | None = None
    _last: int = -1
    _steps: int = 0

    def step(self, seconds: list[float]) -> dict[str, float | int]:
        """Return the columns of the metrics. seconds: what each rank computed in a step."""
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        median = sorted(seconds)[(len(seconds) - 1) // 2]
        slow = seconds[slowest] > STRAGGLES * median
        self._steps = (self._steps + 1 if slowest == self._last else 1) if slow else 0
        self._last = slowest
        self.news = None
        if self._steps == STEPS:
            times = f"{seconds[slowest] / max(median, 1e-9):.1f}"
            self.news = f"rank {slowest} computes {times} times as long as the median rank, for {STEPS} steps in a row"
        return {"compute_s_min": min(seconds), "compute_s_max": seconds[slowest], "slowest_rank": slowest}


STRAGGLES, STEPS = 1.5, 10
"""How many times as long as the median a straggler computes, and in how many steps in a row."""


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
