"""The row of a step: what metrics.jsonl, the progress and every writer of metrics are told of it."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from te_models.layers import quantization_statistics

from ..model.moe.expert_bias import ExpertLoad
from .metrics import finite
from .ranks.data_parallel import Ranks, largest_over_ranks
from .setup import SetUp
from .step import StepResult
from .trained import step_flops_per_token


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the rows of all steps have in common.

    Attributes:
        tflop_per_token: Model FLOPs of a rank for each token of a step, in 10^12.
        begun: The clock when the first step of this command began, in seconds.
    """

    run: SetUp
    device: str
    ranks: Ranks
    tflop_per_token: float
    begun: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, run: SetUp, device: str, ranks: Ranks) -> Rows:
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
        windows: tuple[int, int],
        *,
        histograms: bool = False,
    ) -> dict[str, Any]:
        """Return the row of a finished step; called by all ranks.

        load: of the experts of all layers; None: there are none. seconds, data_s: what this rank took for the step, and
        of it for reading the data. windows: how many the step read, and all steps until now, on all ranks.
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
        row["tflops"] = self.tflop_per_token * tokens / seconds
        if config.log.peak_tflops is not None:
            row["mfu"] = row["tflops"] / config.log.peak_tflops
        return row

    def quantization(self) -> dict[str, dict[str, float | None]]:
        """Return what the recipe did to the operands of the last step that noted it."""
        return finite(quantization_statistics(self.run.model))


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
