"""Balance without an auxiliary loss: a bias per expert that steers the choice and nothing else.

Wang et al. 2024 (arXiv 2408.15664), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). After each step an expert that more
tokens chose than the mean is made less attractive by a constant, one that fewer chose more attractive. No gradient is
involved, so the loss measures the text alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.layers.collectives import check_group

from .router import Router

if TYPE_CHECKING:  # a torch without distributed has none
    from torch.distributed import ProcessGroup

UPDATE_RATE = 1e-3
"""The papers' rate. Scores are between 0 and 1, and so is a bias that matters."""


@torch.no_grad()
def update_expert_bias(
    model: nn.Module, rate: float | Tensor = UPDATE_RATE, *, process_group: ProcessGroup | None = None
) -> Tensor:
    """Move each router's `expert_bias` by `rate * sign(mean - count)`, forget the counts, and return them.

    Call it once after each optimizer step, on all ranks. It is the sum over the forward passes in training mode with
    gradients since the last call, and over the ranks: padding is left out, and what an activation checkpoint computes
    again. The result is [MoE layers, E] int64, on the model's device; nothing here waits for it. The arithmetic is that
    of whole numbers up to the sign, so all ranks get the same bits, and ranks that see the same tokens (`tp`) may be
    among them.

    model: a GPTModel, or what holds or wraps one. rate: Megatron-Core's `moe_router_bias_update_rate`; 0 only counts,
    as for a step that was skipped; a float32 scalar tensor is not looked at. process_group: the ranks that have the
    same layers, where others have others (pipeline stages); None: all of the default group, if there is one.

    Raises ValueError for a negative or infinite rate and for a model without expert bias.

    Example:
        optimizer.step()
        load = update_expert_bias(model, 1e-3)
    """
    if not isinstance(rate, Tensor):
        check_rate(rate)
    if process_group is not None:
        check_group("process_group", process_group)
    buffers = biases_and_counts(model)
    counts = torch.stack([own for _, own in buffers])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
        dist.all_reduce(counts, group=process_group)
    below = counts.sum(dim=-1, keepdim=True) - counts * counts.shape[-1]  # E times the distance from the mean
    for (bias, own), change in zip(buffers, below.sign().float() * rate, strict=True):
        bias.add_(change)
        own.zero_()
    return counts


def check_rate(rate: float) -> None:
    """Raise ValueError for a rate that is negative or infinite."""
    if not 0 <= rate < math.inf:
        raise ValueError(f"rate is {rate!r}; allowed: zero or a positive number")


def has_expert_bias(model: nn.Module) -> bool:
    """Whether a router of the model has an expert bias."""
    return any(isinstance(m, Router) and m.expert_bias is not None for m in model.modules())


def biases_and_counts(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """List (expert_bias, expert_counts) of each router that has them, in the order of the layers. Raises ValueError if
    there is none."""
    routers = [m for m in model.modules() if isinstance(m, Router)]
    pairs = [(router.expert_bias, router.expert_counts) for router in routers]
    found = [(bias, counts) for bias, counts in pairs if bias is not None and counts is not None]
    if not found:
        raise ValueError("model has no expert bias; allowed: one whose config.moe.router.expert_bias is true")
    return found


def max_load(counts: Tensor) -> Tensor:
    """Return how many times the mean load the fullest expert of any layer has, a float32 scalar: 1 is balance, E that
    one expert has every token where each chooses one. counts: [MoE layers, E] int64; a layer without tokens is 0."""
    return (counts.amax(-1) * counts.shape[-1] / counts.sum(-1).clamp(min=1)).amax()
