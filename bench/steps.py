"""One train step of our model, as the benchmarks time it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import te_models
from te_models.training.config import OptimizerConfig, PrecisionConfig
from te_models.training.optimizer import Optimizer
from te_models.training.step import make_loss_function

Step = Callable[[], torch.Tensor]


def our_step(folder: Path, input_ids: torch.Tensor, *, compiled: bool, recipe: str = "bf16") -> Step:
    """Return a function that trains our model one step and returns the loss. recipe: a name, or "bf16" for none."""
    model = te_models.GPTModel.from_pretrained(folder, dtype=torch.bfloat16).train()
    precision = PrecisionConfig.from_dict({"dtype": "bf16", "recipe": "none" if recipe == "bf16" else recipe})
    loss_function = make_loss_function(model, precision, "cpu", compiled=compiled)
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss, _ = loss_function(input_ids)
        loss.backward()
        optimizer.step(1e-4)
        return loss.detach()

    return step
