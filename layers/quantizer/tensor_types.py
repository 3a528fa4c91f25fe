"""The classes of tensors that quantizers make, found by format: `quantize` with a gradient, and `make_empty`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TENSOR_TYPES: dict[str, Any] = {}
"""Format -> the class of tensor that `quantize` makes, "" -> that of formats without one, and "grouped" -> the class of
a stack of matrices. The modules of these classes, which are built on quantizers, enter them when they are imported."""


def type_of(quantizer: Any) -> Any:
    """Return the class of tensor that a quantizer makes."""
    return TENSOR_TYPES.get(quantizer.FORMAT) or TENSOR_TYPES[""]


def quantize_with(quantizer: Any, x: Tensor, key: Tensor | None, dtype: torch.dtype | None) -> Any:
    """Return `Quantizer.quantize` by a value or by the live quantizer of delayed scaling."""
    if dtype is not None and dtype != x.dtype:
        return quantize_with(quantizer, x, key, None).to(dtype)
    if x.requires_grad and torch.is_grad_enabled():
        return _Quantize.apply(x, quantizer, key)
    cls = type_of(quantizer)
    if x.dim() == cls.RANK:
        return cls.quantize(x, quantizer, key)
    flat = cls.quantize(x.reshape(1, -1) if x.dim() < 2 else x.flatten(0, -2), quantizer, key)
    return flat.wrap(flat.fields, shape=x.shape, matrix_shape=flat.shape)


def empty_tensor(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Any:
    """Return an uninitialised tensor of a quantizer's format, of logical shape [..., C] or [], one number."""
    cls, size = type_of(quantizer), torch.Size(shape)
    matrix = (size[:-1].numel(), size[-1]) if size else (1, 1)
    flat = cls.empty(matrix, quantizer, dtype, torch.get_default_device() if device is None else device)
    return flat if len(size) == cls.RANK else flat.wrap(flat.fields, shape=size, matrix_shape=flat.shape)


class _Quantize(torch.autograd.Function):
    """`quantize_with` with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Any, key: Tensor | None) -> Any:
        ctx.dtype = x.dtype
        return quantize_with(quantizer, x.detach(), key, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None
