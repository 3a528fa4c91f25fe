"""What each torch operation does with quantized tensors.

Copies and views keep the quantized form; `_run_in_place` serves every mutating operation; whatever else there is
computes with the dequantized values. A view outside the table is refused, because a copy in its place would swallow
what is written to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from . import tensor_views as views
from .quantized_tensor import QuantizedTensor

aten = torch.ops.aten


def dispatch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run one operation that has a quantized tensor among its arguments."""
    if func in _KEEPS_QUANTIZED and isinstance(args[0], QuantizedTensor):
        return _KEEPS_QUANTIZED[func](*args, **kwargs)
    if func._schema.is_mutable:
        return _run_in_place(func, args, kwargs)
    if args and isinstance(args[0], QuantizedTensor) and any(r.alias_info is not None for r in func._schema.returns):
        raise views.refused(func._schema.name.removeprefix("aten::"), args[0])
    return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


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


def _clone(x: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    return x.map_fields(torch.clone)


def _to_copy(x: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    """Move the fields; a floating dtype becomes the dtype of all values read from then on (the eight-bit numbers
    themselves have no other), an integer one has no quantized form."""
    if dtype is not None and not dtype.is_floating_point:
        return x.dequantize().to(dtype=dtype, device=device)
    non_blocking = kwargs.get("non_blocking", False)

    def move(field: Tensor) -> Tensor:
        return field.to(device=device, non_blocking=non_blocking, copy=True)

    new = x.map_fields(move, dtype).keep_attributes(x)
    new.shares_scale = False
    return new


def _pin_memory(x: QuantizedTensor, device: Any = None) -> QuantizedTensor:
    new = x.map_fields(lambda field: field.pin_memory()).keep_attributes(x)
    new.shares_scale = False
    return new


def _is_pinned(x: QuantizedTensor, device: Any = None) -> bool:
    return all(field.is_pinned() for field in x.fields.values())


def _empty_like(x: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    new = x.empty_like(device, dtype).keep_attributes(x)  # `Module.to_empty` puts it in the parameter's place
    new.shares_scale = False
    return new


def _new_empty(
    x: QuantizedTensor, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Tensor:
    """Quantized for a size of the matrix's rank, plain otherwise."""
    shape, wanted, device = torch.Size(size), dtype or x.dtype, device or x.device
    if len(shape) != len(x.matrix_shape) or not wanted.is_floating_point:
        return torch.empty(shape, dtype=wanted, device=device)
    return x.new_empty_of(shape, wanted, device)


def _new_zeros(x: QuantizedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    return _new_empty(x, size, **kwargs).zero_()


def _copy_(x: QuantizedTensor, source: Tensor, non_blocking: bool = False) -> QuantizedTensor:
    return x.quantize_(source)


# What keeps the quantized form. `zeros_like` is not here: it is what an optimizer makes its moments with, and those
# must be plain tensors. For a quantized zero, `torch.empty_like(x).zero_()`.
_KEEPS_QUANTIZED: dict[Any, Callable[..., Any]] = {
    aten.detach.default: views.alias,
    aten.alias.default: views.alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
    aten.empty_like.default: _empty_like,
    aten.new_empty.default: _new_empty,
    aten.new_zeros.default: _new_zeros,
    aten.copy_.default: _copy_,
    aten.view.default: views.view,
    aten._unsafe_view.default: views.view,
    aten.as_strided.default: views.as_strided,
    aten.expand.default: views.expand,
    aten.t.default: lambda x: views.transpose(x, -2, -1),
    aten.transpose.int: views.transpose,
    aten.permute.default: views.permute,
    aten.slice.Tensor: views.slice_,
    aten.select.int: views.select,
    aten.unbind.int: views.unbind,
    aten.split.Tensor: views.split,
    aten.split_with_sizes.default: views.split_with_sizes,
}
