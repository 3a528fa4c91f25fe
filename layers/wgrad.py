"""Where a weight's gradient goes: to autograd, into a main gradient in place, or to be computed later.

A weight `w` may carry `w.main_grad`, a tensor of its shape (usually float32) that an optimizer reads instead of
`w.grad`. Fused accumulation adds each micro-batch's gradient to it and gives autograd None; `w.overwrite_main_grad =
True` makes a pass write instead of add, so that nobody has to zero it. Names as in Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .sides import Side


@dataclass(eq=False)
class WeightGradient:
    """What a module does with the gradient of one weight. main_grad: tensor to accumulate into, or None; overwrite:
    write instead of add; later: where delayed computations queue up, or None to compute at once; wanted: whether the
    weight has a gradient in this pass. members: of several weights whose gradients are computed together, what is done
    with each; then main_grad, overwrite and wanted are unused."""

    main_grad: Tensor | None = None
    overwrite: bool = False
    later: list[Callable[[], None]] | None = field(default=None)
    wanted: bool = True
    members: tuple[WeightGradient, ...] = ()

    def each(self) -> tuple[WeightGradient, ...]:
        """Return what is done with each weight."""
        return self.members or (self,)


def weight_gradient(
    weights: tuple[nn.Parameter, ...],
    fuse_wgrad_accumulation: bool,
    later: list[Callable[[], None]] | None,
    overwrite: bool = False,
) -> WeightGradient | None:
    """Return what to do with the gradients of `weights`, computed together; None: what autograd does. overwrite: write
    to main gradients in any case."""
    if not fuse_wgrad_accumulation:
        return None if later is None else WeightGradient(later=later)
    members = tuple(_into_main_grad(weight, later, overwrite) for weight in weights)
    return members[0] if len(members) == 1 else WeightGradient(later=later, members=members)


def main_grads(how: WeightGradient | None) -> tuple[Tensor, ...]:
    """Return the tensors that gradients are accumulated into, one per weight that has a gradient; none where they are
    not."""
    return () if how is None else tuple(one.main_grad for one in how.each() if one.main_grad is not None)


def _into_main_grad(weight: nn.Parameter, later: list[Callable[[], None]] | None, overwrite: bool) -> WeightGradient:
    if not (torch.is_grad_enabled() and weight.requires_grad):  # evaluation, or a frozen weight: nothing is accumulated
        return WeightGradient(later=later, wanted=False)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError("fuse_wgrad_accumulation needs weight.main_grad, a tensor of the weight's shape; it has none")
    if main_grad.shape != weight.shape:
        raise ValueError(f"weight.main_grad has shape {tuple(main_grad.shape)}; expected {tuple(weight.shape)}")
    return WeightGradient(main_grad, overwrite or bool(getattr(weight, "overwrite_main_grad", False)), later)


def run_wgrad(
    how: WeightGradient | None,
    weights: tuple[Tensor, ...],
    sides: Sequence[Side],
    compute: Callable[[], tuple[Tensor | None, ...]],
) -> tuple[Tensor | None, ...]:
    """Run `compute` now or queue it; return what autograd gets. sides: what it reads; compute: returns the gradient of
    each weight, or None where it went into the main gradient.

    What is not quantized is queued as it is, the caller's own tensors: a copy would take the memory that is free by
    then. As autograd does for what it saved, a queued computation raises RuntimeError where one was written to since.
    """
    if how is None or how.later is None:
        return compute()
    if torch.compiler.is_compiling():
        raise RuntimeError("delay_wgrad_compute does not work inside torch.compile: the computation is a later call")

    read = [part for side in sides for part in side if isinstance(part, Tensor)]
    versions = [tensor._version for tensor in read]

    def run() -> None:
        if versions != [tensor._version for tensor in read]:
            raise RuntimeError(
                "the input of a layer or the gradient of its output was written to between the backward pass and "
                "backward_dw(), which reads them; allowed: backward_dw() first, or copies of what is written to"
            )
        for weight, gradient in zip(weights, compute(), strict=True):
            if gradient is not None and weight.requires_grad:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    how.later.append(run)
    return (None,) * len(weights)
