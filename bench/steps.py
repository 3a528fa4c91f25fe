"""Train steps of our model, as the benchmarks time and compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import te_models
from te_models.layers import Recipe, autocast
from te_models.training.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from te_models.training.data.windows import Windows
from te_models.training.optimizer.adamw import Optimizer
from te_models.training.optimizer.schedule import lr_at
from te_models.training.ranks.data_parallel import ranks_from_environment
from te_models.training.step import make_loss_function, train_step

Step = Callable[[], torch.Tensor]


def torch_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, whose moments have the parameter's dtype; matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)


def our_step(
    folder: Path,
    *batches: torch.Tensor,
    compiled: bool,
    dynamic: bool = False,
    recipe: Recipe | None = None,
    with_torch_adamw: bool = False,
) -> Step:
    """Return a function that trains our model one step on each of the batches [B, S] and returns the last loss. recipe:
    None is bf16.

    dynamic: compiled for all lengths at once; without, as training does it, for the one that there is.
    with_torch_adamw: use `torch_adamw`, as a peer does, and not our own optimizer, whose moments are float32.
    """
    model = te_models.GPTModel.from_pretrained(folder, dtype=torch.bfloat16).train()
    if compiled and dynamic:
        te_models.compile_model(model, dynamic=True)
    one_shape = compiled and not dynamic
    loss_function = make_loss_function(model, PrecisionConfig(dtype="bf16"), "cpu", compiled=one_shape)
    ours = None if with_torch_adamw else Optimizer(model.named_parameters(), OptimizerConfig())
    optimizer = ours or torch_adamw(model)

    def step(input_ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with autocast(enabled=recipe is not None, recipe=recipe):
            loss, _ = loss_function(input_ids)
        loss.backward()
        if ours is None:
            optimizer.step()
        else:
            ours.step(1e-4)
        return loss.detach()

    return lambda: [step(input_ids) for input_ids in batches][-1]


def losses_of_steps(
    model: te_models.GPTModel,
    windows: Windows,
    *,
    steps: int,
    batch: int,
    lr: float,
    schedule: ScheduleConfig,
    precision: str = "bf16-mixed",
    recipe: Recipe | None = None,
) -> Iterator[float]:
    """Train a model on windows, `batch` a step, compiled by block, and yield the loss of each step. recipe: None is
    none."""
    loss_function = make_loss_function(
        model, PrecisionConfig.from_dict({"dtype": precision}), "cpu", compiled=True, mode="block"
    )
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig(lr=lr))
    region = autocast(enabled=recipe is not None, recipe=recipe)

    def under_recipe(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with region:  # entered for each call: leaving it updates the scales of delayed scaling
            return loss_function(input_ids)

    ranks = ranks_from_environment("cpu")
    for step in range(steps):
        now = lr_at(step, peak=lr, steps=steps, schedule=schedule)
        ids = windows.batch(step * batch, batch)
        yield train_step(under_recipe, optimizer, [ids], now, step=step + 1, ranks=ranks).loss
