"""Public rotary embedding. On CPU the reference runs, eager or fused by Inductor; on an accelerator one registered op.

The tables are the reference's everywhere: they are made once per step and shared by all layers.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ..custom_op import gradient_of, like, operation
from . import reference
from .frequencies import rope_frequencies
from .reference import rope_tables

__all__ = ["apply_rope", "rope", "rope_frequencies", "rope_tables"]


@operation("rope", lambda x: like(x))
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate x [B, S, N, D] by the angles of cos, sin, float32 [B or 1, S, R/2]; inverse: by their negatives.

    Runs in Triton. Differentiable in x, any number of times.
    """
    from . import triton

    return triton.rope(x, cos, sin, interleaved, inverse)


@gradient_of(rope, saves=("cos", "sin", "interleaved", "inverse"))
def _backward(saved: SimpleNamespace, needs: set[str], grad: Tensor) -> dict[str, Tensor]:
    return {"x": rope(grad, saved.cos, saved.sin, saved.interleaved, not saved.inverse)}


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
