"""Public rotary embedding. On CPU the reference runs, eager or fused by Inductor; on an accelerator one registered op.

The tables are the reference's everywhere: they are made once per step and shared by all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .frequencies import rope_frequencies
from .reference import rope_tables

__all__ = ["apply_rope", "rope", "rope_frequencies", "rope_tables"]


@torch.library.custom_op("te_models::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate x [B, S, N, D] by the angles of cos, sin, float32 [B or 1, S, R/2]; inverse: by their negatives.

    Runs in Triton. Differentiable in x, any number of times.
    """
    from . import triton

    return triton.rope(x, cos, sin, interleaved, inverse)


@rope.register_fake
def _(x, cos, sin, interleaved, inverse):
    return x.new_empty(x.shape)


def _setup(ctx, inputs, output) -> None:
    _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad: Tensor):
    return rope(grad, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse), None, None, None, None


rope.register_autograd(_backward, setup_context=_setup)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, style: str = "half") -> Tensor:
    """Rotate the first R channels of x by the tables' angles.

    x: [B, S, N, D]; cos, sin: [B or 1, S, R/2] from `rope_tables`; style: "half" or "interleaved". Returns
    [B, S, N, D] in x's dtype. Differentiable in x. Raises ValueError for another style, tables wider than x, or on an
    accelerator tables that want a gradient.
    """
    reference.check(x, cos, style)
    if x.device.type != "cuda":
        return reference.apply_rope(x, cos, sin, style)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("the tables want a gradient, which the kernel does not compute; pass cos.detach()")
    return rope(x, cos, sin, style == "interleaved", False)
