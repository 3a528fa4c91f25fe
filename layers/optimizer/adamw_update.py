"""The arithmetic of one AdamW step (arXiv 1711.05101) on working copies: torch's fused kernel, or the formula in torch
operations where a compiler is to fuse it with what follows, the rounding and requantization of the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling

from .adamw_pieces import Piece


@dataclass
class Update:
    """A piece of a parameter within a step: where it is stored, and its working copies (or the stored tensors).

    weight, gradient, first, second: of one dtype and the piece's shape.
    """

    piece: Piece
    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor


def update_(work: list[Update], group: dict[str, Any], noop: Tensor | None) -> None:
    """Update weights, moments and step counts in place.

    group: lr, betas, weight_decay and eps; noop: a scalar tensor; where it is nonzero nothing changes, decided on the
    device.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Update]] = {}
    for update in work:
        by_kind.setdefault((update.weight.device, update.weight.dtype), []).append(update)
    for (device, _), updates in by_kind.items():
        found_inf = None if noop is None else (noop.reshape(()) != 0).to(device, torch.float32)
        leading = [update.piece.state["step"] for update in updates if update.piece.begin == 0]
        if leading:
            # a tensor by itself would be taken for a number, which the host has to wait for
            more = 1 if found_inf is None else [1 - found_inf] * len(leading)
            torch._foreach_add_(leading, more)  # type: ignore[attr-defined]
        if compiling():
            # the fused kernel on lists cannot be functionalized (torch 2.13)
            for update in updates:
                _formula_(update, group, found_inf)
            continue
        torch._fused_adamw_(  # type: ignore[attr-defined]
            [update.weight for update in updates],
            [update.gradient for update in updates],
            [update.first for update in updates],
            [update.second for update in updates],
            [],
            [update.piece.state["step"] for update in updates],
            amsgrad=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=found_inf,
        )


def _formula_(update: Update, group: dict[str, Any], found_inf: Tensor | None) -> None:
    """Do what the fused kernel does; the results differ from its by roundings."""
    lr, (beta1, beta2), g = group["lr"], group["betas"], update.gradient
    t = update.piece.state["step"].double()
    first_correction = (1 - torch.pow(beta1, t)).to(g.dtype)
    second_correction = (1 - torch.pow(beta2, t)).sqrt().to(g.dtype)
    first = update.first + (1 - beta1) * (g - update.first)
    second = update.second * beta2 + (1 - beta2) * g * g
    step = lr / first_correction * (first / (second.sqrt() / second_correction + group["eps"]))
    weight = update.weight * (1 - lr * group["weight_decay"]) - step
    for old, new in ((update.weight, weight), (update.first, first), (update.second, second)):
        old.copy_(new if found_inf is None else torch.where(found_inf != 0, old, new))
