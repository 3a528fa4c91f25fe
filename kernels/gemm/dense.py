"""`x weight^T + bias` on matrices that no recipe quantizes, in the dtype that the machine multiplies them in.

Where that is the dtype of x, these are torch's own functions. On a CPU that multiplies 16-bit matrices in float32
(`cpu`), the operands are up-cast for the GEMM and given up after it: what is saved for the backward pass stays 16-bit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..without_autocast import without_autocast
from . import gemv
from .cpu import in_float32
from .float32 import float32_product, gemm_float32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight^T + bias` in x's dtype. x: [..., K]; weight: [N, K]; bias: [N] or None, all of one dtype.

    Differentiable, twice, and by `torch.func`.
    """
    if not torch.is_grad_enabled() and gemv.uses_gemv(x, weight, bias):
        return gemv.gemv_linear(x, weight, bias)
    if not in_float32(x):
        return F.linear(x, weight, bias)
    if torch._C._are_functorch_transforms_active():
        with without_autocast(wide := x.float()):
            return F.linear(wide, weight.float(), None if bias is None else bias.float()).to(x.dtype)
    left, right = x.reshape(-1, x.shape[-1]), weight.t()
    wants = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    multiply = _Multiply.apply if wants and not torch.compiler.is_compiling() else _multiply
    return multiply(left, right, bias).view(*x.shape[:-1], weight.shape[0])


def multiply_dense(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` in left's dtype, [M, K] by [K, N], both of one dtype."""
    return _multiply(left, right, None) if in_float32(left) else left @ right


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` in left's dtype: [..., M, K] by [..., K, N], both of one dtype."""
    if not in_float32(left):
        return left @ right
    with without_autocast(wide := left.float()):
        return (wide @ right.float()).to(left.dtype)


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():  # perhaps in another thread, where the operation costs time and nothing else
        return gemm_float32(left, right, bias, left.dtype)
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad or bias is not None):
        return _Multiply.apply(left, right, bias)
    return float32_product(left, right, bias, left.dtype)


class _Multiply(torch.autograd.Function):
    """`multiply_dense` outside of graphs, where a registered operation would cost 0.1 ms more a call."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return float32_product(left, right, bias, left.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        left, right = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            multiply_dense(dy, right.t()) if needs[0] else None,
            multiply_dense(dy.t(), left).t() if needs[1] else None,  # as the weight lies
            dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs[2] else None,
        )
