"""How evenly experts are loaded, and balance without an auxiliary loss: a bias per expert that steers the choice and
nothing else.

Wang et al. 2024 (arXiv 2408.15664), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). After each step an expert that more
tokens chose than the mean is made less attractive by a constant, one that fewer chose more attractive. No gradient is
involved, so the loss measures the text alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

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

    Call it once after each optimizer step, on all ranks. They are the sum over the forward passes in training mode with
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
    biases_and_counts(model)  # there are some
    counts = take_expert_load(model, process_group=process_group).tokens
    move_expert_bias(model, counts, rate)
    return counts


@torch.no_grad()
def move_expert_bias(model: nn.Module, counts: Tensor, rate: float | Tensor) -> None:
    """Move the biases as `update_expert_bias` does, for counts, [MoE layers, E], that `take_expert_load` returned; a
    layer whose experts a table chooses has none."""
    below = counts.sum(dim=-1, keepdim=True) - counts * counts.shape[-1]  # E times the distance from the mean
    for router, change in zip(_routers(model), below.sign().float() * rate, strict=True):
        if router.expert_bias is not None:
            router.expert_bias.add_(change)


def _routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


class ExpertLoad(NamedTuple):
    """tokens: [MoE layers, E] int64, how many tokens chose each expert, without padding; dropped: [MoE layers] int64,
    how many of these choices found no room."""

    tokens: Tensor
    dropped: Tensor

    def metrics(self, repeated: int = 1) -> dict[str, list[float]]:
        """Return numbers for a log, one for each MoE layer; here the host waits for the device.

        max_load: times the mean that the fullest expert has, see `max_load`. entropy: of the experts' shares of the
        choices, in nats; log(E) is balance, 0 that one expert has all. dropped_tokens: choices that found no room.
        repeated: on how many ranks each token was counted.
        """
        shares = self.tokens.double() / self.tokens.sum(-1, keepdim=True).clamp(min=1)
        entropy = torch.special.entr(shares).sum(-1)
        fullest = max_load(self.tokens, each=True).double()
        rows = torch.stack([fullest, entropy, self.dropped.double() / repeated]).tolist()
        return dict(zip(("max_load", "entropy", "dropped_tokens"), rows, strict=True))


@torch.no_grad()
def take_expert_load(model: nn.Module, *, process_group: ProcessGroup | None = None) -> ExpertLoad:
    """Return how the experts of each MoE layer were loaded since the last call, and forget it.

    What counts, and over which ranks it is summed: see the caller, `update_expert_bias`. Nothing here waits for
    the device. Where the load-balancing loss is over the global batch, a call ends the batch: call it, or
    `update_expert_bias`, once after each optimizer step. Raises ValueError for a model without experts.
    """
    routers = _routers(model)
    if not routers:
        raise ValueError("model has no experts; allowed: one whose config.moe is set")
    counts = torch.stack([torch.cat([router.expert_counts, router.dropped_tokens]) for router in routers])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
        dist.all_reduce(counts, group=process_group)
    for router in routers:
        router.expert_counts.zero_()
        router.dropped_tokens.zero_()
    return ExpertLoad(counts[:, :-1], counts[:, -1])


def check_rate(rate: float) -> None:
    """Raise ValueError for a rate that is negative or infinite."""
    if not 0 <= rate < math.inf:
        raise ValueError(f"rate is {rate!r}; allowed: zero or a positive number")


def has_expert_bias(model: nn.Module) -> bool:
    """Whether a router of the model has an expert bias."""
    return any(router.expert_bias is not None for router in _routers(model))


def biases_and_counts(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """List (expert_bias, expert_counts) of each router that has them, in the order of the layers. Raises ValueError for
    a model without one."""
    found = [(r.expert_bias, r.expert_counts) for r in _routers(model) if r.expert_bias is not None]
    if not found:
        raise ValueError("model has no expert bias; allowed: one whose config.moe.router.expert_bias is true")
    return found


def max_load(counts: Tensor, *, each: bool = False) -> Tensor:
    """Return how many times the mean load the fullest expert of any layer (of `each`: [MoE layers]) has, float32: 1 is
    balance, E that one expert has every token where each chooses one. counts: [MoE layers, E] int64; a layer without
    tokens is 0."""
    loads = counts.amax(-1) * counts.shape[-1] / counts.sum(-1).clamp(min=1)
    return loads if each else loads.amax()


COLLAPSED_STEPS = 20
"""Steps in a row that a layer has to be collapsed for."""
_NEAR = 0.2
"""Part of the way from the floor of the entropy to that of balanced experts."""


class CollapseWatch:
    """Watches the load of the experts of each MoE layer over the steps of a run.

    A layer counts as collapsed while an expert has no token, or while the entropy of the experts' shares is near its
    floor, log(top-k), reached when all tokens choose the same experts. topk, experts: of a layer.
    """

    def __init__(self, topk: int, experts: int) -> None:
        self._floor = math.log(topk) + _NEAR * (math.log(experts) - math.log(topk))
        self._can_collapse = topk < experts
        self._steps: dict[int, int] = {}
        self._told = False

    def step(self, load: ExpertLoad) -> str | None:
        """Take the load of a step; return, once in a run, the sentence that a layer has collapsed."""
        if self._told or not self._can_collapse:
            return None
        shares = load.tokens.double() / load.tokens.sum(-1, keepdim=True).clamp(min=1)
        entropy, idle = -torch.xlogy(shares, shares).sum(-1), (load.tokens == 0).sum(-1)
        for layer, (nats, unused) in enumerate(zip(entropy.tolist(), idle.tolist(), strict=True)):
            self._steps[layer] = self._steps.get(layer, 0) + 1 if unused or nats <= self._floor else 0
            if self._steps[layer] == COLLAPSED_STEPS:
                self._told = True
                what = (
                    f"{unused} of its {load.tokens.shape[-1]} experts get no token" if unused else "a few get them all"
                )
                return (
                    f"the experts of MoE layer {layer} have collapsed: for {COLLAPSED_STEPS} steps {what}; "
                    "model.config.moe.aux_loss_coeff = 0.01, or router.expert_bias = true, balances them"
                )
        return None
