"""Quantized tensors: `torch.Tensor` subclasses around the fields their quantizer declares.

One base class does everything from that declaration: wrapping, `__tensor_flatten__`, device moves, copies, in-place
updates. A leaf class exists per format so that users can name it. To autograd and to users the tensor has its
logical (high-precision) shape and dtype; an operation without a quantized meaning sees the dequantized values, and an
in-place one (an optimizer step) requantizes its result into the very storage the GEMMs read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from te_models.kernels.gemm import Operand

from .quantizer import Fields, Quantizer, Usage

aten = torch.ops.aten
T = TypeVar("T", bound="QuantizedTensor")


class QuantizedTensor(torch.Tensor):
    """Base of quantized tensors. Attributes: `quantizer`, and one tensor per name in `quantizer.field_names()`."""

    FORMAT: ClassVar[str]
    quantizer: Quantizer

    @staticmethod
    def __new__(cls: type[T], fields: Fields, quantizer: Quantizer, shape: torch.Size, dtype: torch.dtype) -> T:
        """Wrap existing fields. shape, dtype: the logical ones."""
        device = next(iter(fields.values())).device
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.quantizer = quantizer
        for name in quantizer.field_names():
            setattr(self, name, fields[name])
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def quantize(cls, x: Tensor, quantizer: Quantizer) -> Self:
        """Return x quantized; x: any floating dtype, of the rank the class holds."""
        if x.dim() != cls._rank():
            raise ValueError(f"{cls.__name__} holds {cls._rank()}-D tensors; got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{cls.__name__} quantizes floating-point tensors; got {x.dtype}")
        x = x.detach()
        return cls(quantizer.quantize_fields(x), quantizer, x.shape, x.dtype)

    @classmethod
    def _rank(cls) -> int:
        return 2

    @property
    def fields(self) -> Fields:
        """The stored tensors by name; the tensors themselves, not copies."""
        return {name: getattr(self, name) for name in self.quantizer.field_names()}

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values in `dtype` (None: the logical dtype). Differentiable: the gradient is the identity."""
        return _Dequantize.apply(self, dtype or self.dtype)

    def operand(self, usage: Usage, dtype: torch.dtype) -> Operand:
        """Return the tensor as the operand of a GEMM, exactly as stored."""
        return self.quantizer.operand_of_fields(self.fields, usage, dtype)

    @torch.no_grad()
    def quantize_(self, x: Tensor) -> Self:
        """Overwrite with x quantized anew (or, for a tensor with an equal quantizer, with its very fields)."""
        if x.shape != self.shape:
            raise ValueError(f"cannot quantize shape {tuple(x.shape)} into a tensor of shape {tuple(self.shape)}")
        if isinstance(x, QuantizedTensor) and x.quantizer == self.quantizer:
            source = x.fields
        else:
            source = self.quantizer.quantize_fields(_plain(x))
        for name, field in self.fields.items():
            field.copy_(source[name])
        return self

    # --- the subclass protocol -------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Quantizer, torch.dtype]]:
        return list(self.quantizer.field_names()), (self.quantizer, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Fields, meta: tuple[Quantizer, torch.dtype], outer_size: torch.Size, outer_stride: Any
    ) -> Self:
        quantizer, dtype = meta
        return cls(inner, quantizer, outer_size, dtype)

    def _stable_hash_for_caching(self) -> str:
        """Return what a compiled graph depends on, the same in every process: the key of the compiler's cache."""
        layout = [(n, f.shape, f.stride(), f.dtype, f.device) for n, f in self.fields.items()]
        logical = (self.shape, self.dtype, self.device, self.requires_grad, self.quantizer.to_dict())
        return hashlib.sha256(repr((type(self).__qualname__, logical, layout)).encode()).hexdigest()

    def _map_fields(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        """Return a tensor of the same kind whose fields are `function` of these."""
        fields = {name: function(field) for name, field in self.fields.items()}
        return type(self)(fields, self.quantizer, self.shape, dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _KEEPS_QUANTIZED and isinstance(args[0], QuantizedTensor):
            return _KEEPS_QUANTIZED[func](*args, **kwargs)
        if func._schema.is_mutable:
            return _run_in_place(func, args, kwargs)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"quantizer={self.quantizer})"
        )


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.quantizer.dequantize_fields(x.fields, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


def _run_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a mutating operation on high-precision copies and requantize what its schema says it wrote.

    Arguments are matched to the schema by name, positional and keyword ones alike.
    """
    copies: dict[int, Tensor] = {}
    originals: dict[int, QuantizedTensor] = {}

    def unwrap(value: Any) -> Any:
        if not isinstance(value, QuantizedTensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.dequantize()
            originals[id(copies[id(value)])] = value
        return copies[id(value)]

    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for written in tree_leaves(kwargs.get(argument.name, args[i] if i < len(args) else None)):
            if isinstance(written, QuantizedTensor):
                written.quantize_(copies[id(written)])
    return tree_map(lambda value: originals.get(id(value), value), result)


def _detach(self: QuantizedTensor) -> QuantizedTensor:
    return self._map_fields(lambda field: field)


def _clone(self: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    return self._map_fields(torch.clone)


def _to_copy(self: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    """Move the fields; a floating dtype becomes the new logical dtype, without touching a quantized number."""
    if dtype is not None and not dtype.is_floating_point:
        return self.dequantize().to(dtype=dtype, device=device)
    non_blocking = kwargs.get("non_blocking", False)
    return self._map_fields(lambda field: field.to(device=device, non_blocking=non_blocking, copy=True), dtype)


def _empty_like(self: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return self._map_fields(lambda field: torch.empty_like(field, device=device), dtype)


def _copy_(self: QuantizedTensor, source: Tensor, non_blocking: bool = False) -> QuantizedTensor:
    return self.quantize_(source)


# What keeps the quantized form. `zeros_like` is not here: an optimizer's moments must be plain tensors.
_KEEPS_QUANTIZED: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
}


class Float8Tensor(QuantizedTensor):
    """FP8 with one scale. Fields: rowwise_data [R, C], rowwise_scale_inv []."""

    FORMAT: ClassVar[str] = "float8"


class Float8BlockwiseTensor(QuantizedTensor):
    """FP8 with a scale per 1x128 or 128x128 block; fields as `Float8BlockQuantizer` says."""

    FORMAT: ClassVar[str] = "float8_block"


class MXFP8Tensor(QuantizedTensor):
    """FP8 with a power-of-two scale byte per 32 values; fields as `MXFP8Quantizer` says."""

    FORMAT: ClassVar[str] = "mxfp8"


TENSOR_CLASSES: dict[str, type[QuantizedTensor]] = {
    c.FORMAT: c for c in (Float8Tensor, Float8BlockwiseTensor, MXFP8Tensor)
}
