"""What each torch operation does with quantized tensors.

Copies and views keep the quantized form; `_run_in_place` serves the operations whose schema says what they write;
whatever else there is computes with the dequantized values. Refused is what would write to a copy that nobody sees: a
view outside the table, and an operation whose name says that it works in place and whose schema does not. Collectives
are in `collectives`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from . import views as views
from .collectives import is_collective, plain_value, run_collective
from .quantized_tensor import QuantizedTensor, converts_modules

aten = torch.ops.aten


def dispatch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run one operation that has a quantized tensor among its arguments."""
    if func in _KEEPS_QUANTIZED and isinstance(args[0], QuantizedTensor):
        if torch.is_inference_mode_enabled() and not args[0].is_inference() and _is_view_of(func):
            with torch.inference_mode(False):  # a view is counted with its base; an inference tensor cannot be one
                return _KEEPS_QUANTIZED[func](*args, **kwargs)
        return _KEEPS_QUANTIZED[func](*args, **kwargs)
    if func is aten._foreach_copy_.default:
        return _foreach_copy_(*args, **kwargs)
    if is_collective(func):
        return run_collective(func, args, kwargs)
    if func._schema.is_mutable:
        return _run_in_place(func, args, kwargs)
    if _named_in_place(func):
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, QuantizedTensor))
        raise ValueError(
            f"{func._schema.name} works in place and does not declare what it writes, so it cannot be run on a "
            f"{type(found).__name__}; call it on dequantize() of that, and copy_ the result"
        )
    if args and isinstance(args[0], QuantizedTensor) and _is_view_of(func):
        # what autograd takes apart, `to` and `reshape`, arrives whole in inference mode
        parts = func.decompose(*args, **kwargs) if torch.is_inference_mode_enabled() else NotImplemented
        if parts is not NotImplemented:
            return parts
        raise views.refused(func._schema.name.removeprefix("aten::"), args[0])
    if func is aten.constant_pad_nd.default and isinstance(args[0], QuantizedTensor):
        args[0].require_equal_shards("padding, for full_tensor or redistribute,")
    return func(*tree_map(plain_value, args), **tree_map(plain_value, kwargs))


def _is_view_of(func: Any) -> bool:
    return not func._schema.is_mutable and any(r.alias_info is not None for r in func._schema.returns)


def _named_in_place(func: Any) -> bool:
    """Whether the name ends in one underscore, as torch's operations in place do."""
    name = func._schema.name
    return name.endswith("_") and not name.endswith("__")


def _run_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a mutating operation on high-precision copies and requantize what its schema says it wrote.

    Arguments are matched to the schema by name, positional and keyword ones alike.
    """
    written = [
        value
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in tree_leaves(kwargs.get(argument.name, args[i] if i < len(args) else None))
    ]
    if func._schema.name in _EXCHANGES_MEMORY:
        _refuse_exchange(func, written)
    _refuse_averages(func, written, args, kwargs)
    targets = set(map(id, written))
    dequantized: dict[int, Tensor] = {}
    originals: dict[int, QuantizedTensor] = {}

    def unwrap(value: Any) -> Any:
        if not isinstance(value, QuantizedTensor):
            return value
        if id(value) not in dequantized:
            dequantized[id(value)] = value.dequantize(None if id(value) in targets else _dtype_beside(value, written))
            originals[id(dequantized[id(value)])] = value
        return dequantized[id(value)]

    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    for value in written:
        if isinstance(value, QuantizedTensor):
            value.quantize_(dequantized[id(value)])
    return tree_map(lambda value: originals.get(id(value), value), result)


def _dtype_beside(x: QuantizedTensor, written: list[Any]) -> torch.dtype:
    """Return the dtype to read x in: float32 where it goes into a float32 average, else its own."""
    into = written[0] if written and type(written[0]) is Tensor and written[0].is_floating_point() else x
    return torch.promote_types(x.dtype, into.dtype)


_EXCHANGES_MEMORY = ("aten::set_", "aten::resize_", "aten::resize_as_")


def _refuse_exchange(func: Any, written: list[Any]) -> None:
    for value in written:
        if isinstance(value, QuantizedTensor):
            raise ValueError(
                f"{func._schema.name.removeprefix('aten::')} exchanges the memory of a tensor, and a "
                f"{type(value).__name__} has none that holds its values; call copy_ or quantize_"
            )


def _refuse_averages(func: Any, written: list[Any], args: tuple, kwargs: dict) -> None:
    """Raise ValueError where an operation in place would keep an average in a quantized tensor, whose format rounds the
    small steps away, one after the other: `lerp_`, and what combines it with another quantized tensor."""
    into = next((value for value in written if isinstance(value, QuantizedTensor)), None)
    if into is None or not _named_in_place(func):
        return
    own = {id(field) for value in written if isinstance(value, QuantizedTensor) for field in value.fields.values()}
    read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, QuantizedTensor)]
    others = [value for value in read if own.isdisjoint(map(id, value.fields.values()))]
    if others or "lerp_" in func._schema.name:
        raise ValueError(
            f"{func._schema.name.removeprefix('aten::')} would keep an average in a {type(into).__name__}, which "
            "rounds its small steps away; keep averages in float32, as x.detach().float() starts one"
        )


def _clone(x: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    return x.map_fields(torch.clone)


def _to_copy(x: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    """Move the fields; another dtype dequantizes the values, but where a module is converted."""
    if dtype is not None and dtype != x.dtype and not (dtype.is_floating_point and converts_modules()):
        values = x.dequantize(dtype if dtype.is_floating_point else None)
        return values.to(dtype=dtype, device=device, non_blocking=kwargs.get("non_blocking", False))
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
    """Quantized in the tensor's own dtype, plain in another."""
    if dtype is not None and dtype != x.dtype:
        return torch.empty(x.shape, dtype=dtype, device=device or x.device)
    new = x.empty_like(device, dtype).keep_attributes(x)  # `Module.to_empty` puts it in the parameter's place
    new.shares_scale = False
    return new


def _new_empty(
    x: QuantizedTensor, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Tensor:
    """Quantized for a size of the matrix's rank and the tensor's own dtype, plain otherwise."""
    shape, wanted, device = torch.Size(size), dtype or x.dtype, device or x.device
    if len(shape) != len(x.matrix_shape) or wanted != x.dtype:
        return torch.empty(shape, dtype=wanted, device=device)
    new = x.new_empty_of(shape, wanted, device)
    new.unequal_shards = x.unequal_shards
    return new


def _new_zeros(x: QuantizedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    return _new_empty(x, size, **kwargs).zero_()


def _copy_(x: QuantizedTensor, source: Tensor, non_blocking: bool = False) -> QuantizedTensor:
    return x.quantize_(source)


def _foreach_copy_(into: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    for x, source in zip(into, sources, strict=True):
        x.copy_(source, non_blocking=non_blocking)


def _record_stream(x: QuantizedTensor, stream: Any) -> None:
    for stored in x.inner_tensors().values():
        stored.record_stream(stream)


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
    aten.record_stream.default: _record_stream,
    aten.view.default: views.view,
    aten._unsafe_view.default: views.view,
    aten.as_strided.default: views.as_strided,
    aten.expand.default: views.expand,
    aten.t.default: lambda x: views.transpose(x, -2, -1),
    aten.transpose.int: views.transpose,
    aten.permute.default: views.transpose_dims,
    aten.slice.Tensor: views.slice_,
    aten.select.int: views.select,
    aten.unbind.int: views.unbind,
    aten.split.Tensor: views.split_dim,
    aten.split_with_sizes.default: views.split_with_sizes,
}
