"""One train step of our model, as the benchmarks time it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import te_models
from te_models.layers import Recipe, autocast
from te_models.training.config import OptimizerConfig, PrecisionConfig
from te_models.training.optimizer.adamw import Optimizer
from te_models.training.step import make_loss_function

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
