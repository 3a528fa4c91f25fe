"""Buffers of the caller for the output of a grouped layer, and for the gradient of its input.

Rows past the last group are left as they are, so that a buffer may be longer than what a step fills.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def written_into(y: Tensor, out: Tensor, m_splits: Tensor) -> Tensor:
    """Write y: [T, C] over `out`, of its shape and dtype, and return that with y's history. m_splits: [G]. ValueError
    for a buffer that does not fit."""
    _check_buffer("out", out, y)
    return out.copy_(torch.where(_inside(y, m_splits), y, out))


def gradient_into(x: Tensor, dgrad_out: Tensor, m_splits: Tensor | None) -> Tensor:
    """Return x: [T, C], whose gradient will be written over `dgrad_out`, of its shape and dtype. m_splits: [G], None
    where all rows are written. ValueError for a buffer that does not fit."""
    _check_buffer("dgrad_out", dgrad_out, x)
    return _GradientInto.apply(x, dgrad_out, m_splits)


def _check_buffer(name: str, buffer: Tensor, like: Tensor) -> None:
    """Raise ValueError unless a buffer can take the place of a tensor `like` this one."""
    if (buffer.shape, buffer.dtype, buffer.device) != (like.shape, like.dtype, like.device):
        got, allowed = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (buffer, like))
        raise ValueError(f"{name} is {got}; allowed: {allowed}")
    if buffer.requires_grad or not buffer.is_contiguous():
        raise ValueError(
            f"{name} requires a gradient or is not contiguous; allowed: a contiguous buffer, {name}.detach() where it "
            "was used before"
        )


def _inside(x: Tensor, m_splits: Tensor) -> Tensor:
    """Return whether each row of x: [T, C] belongs to a group: [T, 1]."""
    return (torch.arange(x.shape[0], device=x.device) < m_splits.sum())[:, None]


class _GradientInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, m_splits: Tensor | None) -> Tensor:
        ctx.buffer = buffer
        ctx.save_for_backward(m_splits)
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dx,), (m_splits,) = grads, ctx.saved_tensors
        if m_splits is not None:
            dx = torch.where(_inside(dx, m_splits), dx, ctx.buffer)
        ctx.buffer.copy_(dx)
        return ctx.buffer, None, None
