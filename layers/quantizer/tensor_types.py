"""The classes of tensors that quantizers make, found by format: `quantize` with a gradient."""

from typing import Any

import torch
from torch import Tensor

TENSOR_TYPES: dict[str, Any] = {}
"""Format -> the class of tensor that `quantize` makes, "" -> that of formats without one, and "grouped" -> the class of
a stack of matrices. The modules of these classes, which are built on quantizers, enter them when they are imported."""


def type_of(quantizer: Any) -> Any:
    """Return the class of tensor that a quantizer makes."""
    return TENSOR_TYPES.get(quantizer.FORMAT) or TENSOR_TYPES[""]


def quantize_with(quantizer: Any, x: Tensor, key: Tensor | None) -> Any:
    """Return `NumberFormat.quantize` by a value or by the live quantizer of delayed scaling."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Quantize.apply(x, quantizer, key)
    cls = type_of(quantizer)
    if x.dim() == cls.RANK:
        return cls.quantize(x, quantizer, key)
    flat = cls.quantize(x.reshape(1, -1) if x.dim() < 2 else x.flatten(0, -2), quantizer, key)
    return flat.wrap(flat.fields, shape=x.shape, matrix_shape=flat.shape)


class _Quantize(torch.autograd.Function):
    """`quantize_with` with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Any, key: Tensor | None) -> Any:
        ctx.dtype = x.dtype
        return quantize_with(quantizer, x.detach(), key)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None
