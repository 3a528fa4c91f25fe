"""Whether the experts of a mixture collapse: told once, with the key that balances them."""

from __future__ import annotations

import math

import torch

from ..model.expert_bias import ExpertLoad

STEPS = 20
"""Steps in a row that a layer has to be collapsed for."""
_NEAR = 0.2
"""Part of the way from the floor of the entropy to that of balanced experts."""


class CollapseWatch:
    """Watches the load of the experts of each MoE layer over the steps of a run.

    A layer counts as collapsed while an expert has no token, or while the entropy of the experts' shares is near its
    floor, log(top-k), which they have when all tokens choose the same experts. topk, experts: of a layer.
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
            if self._steps[layer] == STEPS:
                self._told = True
                what = (
                    f"{unused} of its {load.tokens.shape[-1]} experts get no token" if unused else "a few get them all"
                )
                return (
                    f"the experts of MoE layer {layer} have collapsed: for {STEPS} steps {what}; "
                    "model.config.moe.aux_loss_coeff = 0.01, or router.expert_bias = true, balances them"
                )
        return None
