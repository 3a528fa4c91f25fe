"""Weight gradients added in place into a persistent gradient (`main_grad`).

Registered, and declared to mutate their first argument, so they work under the compiler. Writing into memory that
lives across steps is also what makes them fast on CPU: a gradient in fresh memory costs its page faults every step.
"""

import torch
from torch import Tensor

from ..custom_op import operation
from ..torch_versions import own_result
from . import reference
from .dense import linear, multiply_dense


def check_main_grad(main_grad: Tensor, dy: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError where a wgrad of dy: [T, N] and x: [T, K] does not fit main_grad."""
    if dy.shape[0] != x.shape[0]:
        raise ValueError(f"dy has {dy.shape[0]} rows and x has {x.shape[0]}; both have one row per token")
    if tuple(main_grad.shape) != shape:
        raise ValueError(f"main_grad is {tuple(main_grad.shape)}, but the weight gradient is {shape}")
    if main_grad.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"main_grad is {main_grad.dtype}; allowed: torch.float32, torch.bfloat16")


@operation("gemm_wgrad_accumulate_", lambda: None, mutates=("main_grad",))
def gemm_wgrad_accumulate_(
    main_grad: Tensor, dy: Tensor, x: Tensor, accumulate: bool = True, scale: Tensor | None = None
) -> None:
    """Add `scale * dy^T @ x` to main_grad, or write it there where `accumulate` is False.

    main_grad: [N, K] float32 or bfloat16, requiring no gradient; dy: [T, N] and x: [T, K] of one dtype; scale: a
    float32 scalar tensor or None for 1. Summed in float32 (see `accumulate_product`). Raises ValueError on other
    shapes and dtypes.
    """
    check_main_grad(main_grad, dy, x, (dy.shape[1], x.shape[1]))
    reference.accumulate_product(main_grad, dy.t(), x, accumulate, scale)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad, ctx.bias_dtype = main_grad, None if bias is None else bias.dtype
        return own_result(linear(x, weight, bias))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (dy,) = grads
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        if ctx.needs_input_grad[1]:
            gemm_wgrad_accumulate_(ctx.main_grad, rows, x.reshape(-1, x.shape[-1]))
        dx = multiply_dense(rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        db = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, None, db, None


def linear_accumulating(x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor) -> Tensor:
    """Return `x @ weight^T + bias`; its backward pass adds the gradient of weight to main_grad, autograd gets none.

    x: [..., K]; weight: [N, K]; bias: [N] or None, all of one dtype; main_grad: as for `gemm_wgrad_accumulate_`.
    """
    return _Linear.apply(x, weight, bias, main_grad)
