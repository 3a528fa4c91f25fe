"""The row of a step: what metrics.jsonl, the progress and every writer of metrics are told of it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from te_models.layers import quantization_statistics

from ..model.expert_bias import ExpertLoad
from ..model.flops import training_flops_per_token
from .metrics import finite
from .ranks.data_parallel import Ranks
from .ranks.spread import spread_over_ranks
from .setup import SetUp
from .step import StepResult


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the rows of all steps have in common.

    Attributes:
        tokens_per_step: Tokens of a step on all ranks.
        tflop_of_rank: Model FLOPs of a rank in a step, in 10^12.
        begun: The clock when the first step of this command began, in seconds.
    """

    run: SetUp
    device: str
    ranks: Ranks
    tokens_per_step: int
    tflop_of_rank: float
    begun: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, run: SetUp, device: str, ranks: Ranks) -> Rows:
        """Return the rows of a run, whose clock starts now."""
        data = run.config.data
        tokens = data.gradient_accumulation * run.layout.data.world_size * data.micro_batch_size * data.sequence_length
        flops = training_flops_per_token(run.model_config, data.sequence_length) * tokens
        return cls(
            run=run,
            device=device,
            ranks=ranks,
            tokens_per_step=tokens,
            tflop_of_rank=flops / ranks.world_size / 1e12,
        )

    def row(
        self, step: int, result: StepResult, lr: float, load: ExpertLoad | None, seconds: float, data_s: float
    ) -> dict[str, Any]:
        """Return the row of a finished step; called by all ranks.

        load: of the experts of all layers; None: there are none. seconds, data_s: what this rank took for the step, and
        of it for reading the data.
        """
        row: dict[str, Any] = {"step": step, "loss": result.loss, "aux_loss": result.aux_loss, "lr": lr}
        row |= {
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "tokens": step * self.tokens_per_step,
        }
        row |= {"skipped": True} if result.skipped else {}
        if load is not None:
            layout = self.run.layout
            pp = layout.dims.pipeline_model_parallel_size
            experts = load.metrics(repeated=self.ranks.world_size // (pp * layout.gradients.world_size))
            row |= {"max_expert_load": max(experts["max_load"]), "experts": experts}
        row |= {
            "tokens_per_second": self.tokens_per_step / seconds,
            "seconds": time.perf_counter() - self.begun,
        }
        row |= spread_over_ranks(seconds, data_s, self.device, self.ranks)
        row["tflops"] = self.tflop_of_rank / seconds
        if self.run.config.log.peak_tflops is not None:
            row["mfu"] = row["tflops"] / self.run.config.log.peak_tflops
        return row

    def quantization(self) -> dict[str, dict[str, float | None]]:
        """Return what the recipe did to the operands of the last step that noted it."""
        return finite(quantization_statistics(self.run.model))
