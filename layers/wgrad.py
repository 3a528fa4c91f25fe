"""Where a weight's gradient goes: to autograd, into a main gradient in place, or to be computed later.

A weight `w` may carry `w.main_grad`, a tensor of its shape (usually float32) that an optimizer reads instead of
`w.grad`. Fused accumulation adds each micro-batch's gradient to it and gives autograd None; `w.overwrite_main_grad =
True` makes a pass write instead of add, so that nobody has to zero it. Names as in Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class WeightGradient:
    """What a module does with the gradient of one weight. main_grad: tensor to accumulate into, or None; overwrite:
    write instead of add; later: where delayed computations queue up, or None to compute at once."""

    main_grad: Tensor | None = None
    overwrite: bool = False
    later: list[Callable[[], None]] | None = field(default=None)


def weight_gradient(
    weight: nn.Parameter, fuse_wgrad_accumulation: bool, later: list[Callable[[], None]] | None
) -> WeightGradient | None:
    """Return what to do with the gradient of `weight`; None: what autograd does."""
    if not fuse_wgrad_accumulation:
        return None if later is None else WeightGradient(later=later)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError("fuse_wgrad_accumulation needs weight.main_grad, a tensor of the weight's shape; it has none")
    if main_grad.shape != weight.shape:
        raise ValueError(f"weight.main_grad has shape {tuple(main_grad.shape)}; expected {tuple(weight.shape)}")
    return WeightGradient(main_grad, bool(getattr(weight, "overwrite_main_grad", False)), later)


def run_wgrad(how: WeightGradient | None, weight: Tensor, compute: Callable[[], Tensor | None]) -> Tensor | None:
    """Run `compute` now or queue it; return what autograd gets. compute: returns the gradient, or None where it went
    into the main gradient."""
    if how is None or how.later is None:
        return compute()
    if torch.compiler.is_compiling():
        raise RuntimeError("delay_wgrad_compute does not work inside torch.compile: the computation is a later call")

    def run() -> None:
        gradient = compute()
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

    how.later.append(run)
    return None
