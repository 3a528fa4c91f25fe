"""Where a weight's gradient goes: to autograd, into a main gradient in place, or to be computed later.

A weight `w` may carry `w.main_grad`, a tensor of its shape (usually float32) that an optimizer reads instead of
`w.grad`. Fused accumulation adds each micro-batch's gradient to it and gives autograd None; `w.overwrite_main_grad =
True` makes a pass write instead of add, so that nobody has to zero it. Names as in Megatron-Core.

A wrapper such as Megatron's DistributedDataParallel waits for autograd's hook of every weight, and None does not call
it. It sets `w.grad_added_to_main_grad = False`: a weight that has this attribute gets True there, and autograd a
gradient of zeros, so that whoever adds `w.grad` to `w.main_grad` adds nothing (Megatron-Core does where
`w.zero_out_wgrad` is set). A delayed gradient is announced in the backward pass, too: such a wrapper sees
`w.skip_backward_post_hook` and has `backward_dw` call it, where it wants to find a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling


@dataclass(eq=False)
class WeightGradient:
    """What a module does with the gradient of one weight. main_grad: tensor to accumulate into, or None; overwrite:
    write instead of add; later: where delayed computations queue up, or None to compute at once; wanted: whether the
    weight has a gradient in this pass; announced: the weight whose `grad_added_to_main_grad` says that its main
    gradient was written to, or None. members: of several weights whose gradients are computed together, what is done
    with each; then the other fields but `later` are unused."""

    main_grad: Tensor | None = None
    overwrite: bool = False
    later: list[Callable[[], None]] | None = field(default=None)
    wanted: bool = True
    announced: Any = None
    members: tuple[WeightGradient, ...] = ()

    def each(self) -> tuple[WeightGradient, ...]:
        """Return what is done with each weight."""
        return self.members or (self,)


def weight_gradient(
    weights: tuple[Tensor, ...],
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


def main_grads(wgrad: WeightGradient | None) -> tuple[Tensor, ...]:
    """Return the tensors that gradients are accumulated into, one per weight that has a gradient; none where they are
    not."""
    return () if wgrad is None else tuple(one.main_grad for one in wgrad.each() if one.main_grad is not None)


def main_grad_of(weight: Tensor, fuse_wgrad_accumulation: bool) -> Tensor | None:
    """Return what the gradient of `weight` is accumulated into; None: autograd gets it, or no gradient is wanted.
    Raises ValueError where a weight has no `main_grad` or one of another shape."""
    wgrad = weight_gradient((weight,), fuse_wgrad_accumulation, None)
    return None if wgrad is None else wgrad.main_grad


def _into_main_grad(weight: Tensor, later: list[Callable[[], None]] | None, overwrite: bool) -> WeightGradient:
    if not (torch.is_grad_enabled() and weight.requires_grad):  # evaluation, or a frozen weight: nothing is accumulated
        return WeightGradient(later=later, wanted=False)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError("fuse_wgrad_accumulation needs weight.main_grad, a tensor of the weight's shape; it has none")
    if main_grad.shape != weight.shape:
        raise ValueError(f"weight.main_grad has shape {tuple(main_grad.shape)}; expected {tuple(weight.shape)}")
    announced: Any = weight if hasattr(weight, "grad_added_to_main_grad") else None
    if announced is not None and compiling():  # a graph's backward pass sets no attributes
        announced.grad_added_to_main_grad = True
    overwrite = overwrite or bool(getattr(weight, "overwrite_main_grad", False))
    return WeightGradient(main_grad, overwrite, later, announced=announced)


def run_wgrad(
    wgrad: WeightGradient | None,
    weights: tuple[Tensor, ...],
    operands: Sequence[Any],
    compute: Callable[[], tuple[Tensor | None, ...]],
) -> tuple[Tensor | None, ...]:
    """Run `compute` now or queue it; return what autograd gets. operands: what it reads; compute: returns the gradient
    of each weight, or None where it went into the main gradient.

    What is not quantized is queued as it is, the caller's own tensors: a copy would take the memory that is free by
    then. As autograd does for what it saved, a queued computation raises RuntimeError where one was written to since.
    """
    if wgrad is None:
        return compute()
    if wgrad.later is None:
        return _announced(wgrad, weights, compute())
    if compiling():
        raise RuntimeError("delay_wgrad_compute does not work inside torch.compile: the computation is a later call")

    read = [part for operand in operands for part in operand if isinstance(part, Tensor)]
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

    wgrad.later.append(run)
    return _announced(wgrad, weights, (None,) * len(weights))


def _announced(
    wgrad: WeightGradient | None, weights: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Say on the weights that want to know that their main gradients are or will be written to; return what autograd
    gets, zeros for those."""
    found = list(gradients)
    for g, one in enumerate(() if wgrad is None else wgrad.each()):
        if one.announced is None:
            continue
        if not compiling():
            one.announced.grad_added_to_main_grad = True
        found[g] = torch.zeros(weights[g].shape, dtype=weights[g].dtype, device=weights[g].device)
    return tuple(found)
