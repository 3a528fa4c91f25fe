"""Quantizers and quantized values as arguments of registered operations.

    value quantizer        its text, a constant
    Float8Quantizer        scale, amax (written to), dtype; beside value quantizers, `Quantizer | Float8Quantizer`: the
                           quantizer whose fields it fills, scale, amax
    storages, tensors      the stored fields and what else is a tensor, as one list; class, quantizer, shape and dtype.
                           Also `| None`, and `Tensor | QuantizedTensor`: a plain tensor is a list of itself

Annotations may name a base class or a leaf.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_models.kernels.registry import Encoded, Kind, add_kind

from .delayed import Float8Quantizer
from .grouped_storage import GroupedTensorStorage
from .grouped_tensor import GroupedRows
from .quantized_storage import QuantizedFields, QuantizedStorage
from .quantized_tensor import QuantizedTensor
from .quantizer import Quantizer
from .quantizer_text import quantizer_of, text_of
from .tensor_classes import CLASSES

Live = Quantizer | Float8Quantizer
PLAIN = "Tensor"
"""What stands for the class of a tensor that is not quantized."""


@add_kind
def quantizer_kind(hint: Any) -> Kind | Encoded | None:
    """Quantizers, live ones included."""
    members = _members(hint)
    optional, classes = type(None) in members, members - {type(None)}
    if classes == {Float8Quantizer}:
        return _live_kind() if not optional else None
    if not classes or not all(_is(cls, (Quantizer, Float8Quantizer)) for cls in classes):
        return None
    if Float8Quantizer in classes:
        return None if optional else _any_kind()
    if optional:
        return Encoded(str | None, lambda q: None if q is None else text_of(q), lambda t: t and quantizer_of(t))
    return Encoded(str, text_of, quantizer_of)


def _live_kind() -> Kind:
    parts = {"scale": Tensor, "amax": Tensor | None, "fp8_dtype": torch.dtype}
    return Kind(parts, lambda q: (q.scale, q.amax, q.fp8_dtype), lambda p: Float8Quantizer(*p), mutated=("amax",))


def _any_kind() -> Kind:
    def take(quantizer: Live) -> Sequence[Any]:
        if isinstance(quantizer, Float8Quantizer):
            return quantizer.scale, quantizer.amax, quantizer.value
        return None, None, quantizer

    def make(parts: Sequence[Any]) -> Live:
        scale, amax, value = parts
        return value if scale is None else Float8Quantizer(scale, amax, value.fp8_dtype)

    return Kind({"scale": Tensor | None, "amax": Tensor | None, "": Quantizer}, take, make, mutated=("amax",))


@add_kind
def quantized_kind(hint: Any) -> Kind | None:
    """Storages and tensors, None and plain tensors beside them."""
    members = _members(hint)
    if not any(_is(cls, (QuantizedFields,)) for cls in members):
        return None
    if not all(_is(cls, (QuantizedFields, Tensor, type(None))) for cls in members):
        return None
    parts = {
        "": list[Tensor],
        "class": str | None,
        "quantizer": Quantizer | None,
        "shape": tuple[int, ...],
        "dtype": torch.dtype | None,
    }
    return Kind(parts, _taker(hint, tuple(members)), _made)


def _taker(hint: Any, members: tuple[type, ...]) -> Callable[[Any], Sequence[Any]]:
    def take(value: Any) -> Sequence[Any]:
        if not isinstance(value, members):
            raise TypeError(f"a {type(value).__name__} was passed where an operation takes {hint}")
        if value is None:
            return [], None, None, (), None
        if not isinstance(value, QuantizedFields):
            return [value], PLAIN, None, (), None
        return tensors_of(value), type(value).__name__, value.quantizer, value.shape, value.dtype

    return take


def tensors_of(value: QuantizedFields) -> list[Tensor]:
    """Return what `flatten` of a storage gives, of a tensor, too. ValueError for a view of another shape."""
    value.require_matrix("be an argument of an operation")
    splits = value.m_splits if isinstance(value, (GroupedRows, GroupedTensorStorage)) else None
    return [*value.fields.values(), *([] if splits is None else [splits])]


def _made(parts: Sequence[Any]) -> Any:
    tensors, name, quantizer, shape, dtype = parts
    if name is None:
        return None
    if name == PLAIN:
        return tensors[0]
    shape = torch.Size(shape)
    if name == GroupedTensorStorage.__name__:
        return GroupedTensorStorage.unflatten(tensors, (quantizer, shape, dtype))
    if name not in CLASSES:
        return QuantizedStorage.unflatten(tensors, (quantizer, shape, dtype))
    return tensor_of(CLASSES[name], tensors, quantizer, shape, dtype)


def tensor_of(
    cls: type[QuantizedTensor], tensors: Sequence[Tensor], quantizer: Quantizer, shape: torch.Size, dtype: torch.dtype
) -> QuantizedTensor:
    """Return the tensor whose storage's `flatten` gave these tensors."""
    names = list(quantizer.field_names()) + (["m_splits"] if cls is GroupedRows else [])
    return cls(dict(zip(names, tensors, strict=True)), quantizer, shape, dtype)


def _members(hint: Any) -> set[Any]:
    """Return the classes of a union, or the one class."""
    return set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}


def _is(cls: Any, bases: tuple[type, ...]) -> bool:
    return isinstance(cls, type) and issubclass(cls, bases)
