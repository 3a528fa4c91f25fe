"""Quantizers and quantized values as arguments and results of registered operations.

    value quantizer        its text, a constant
    Float8Quantizer        scale, amax (written to), dtype; beside value quantizers, `Quantizer | Float8Quantizer`: the
                           quantizer whose fields it fills, scale, amax
    storages, tensors      the stored fields and what else is a tensor, as one list; class, quantizer, shape and dtype.
                           Also `| None`, and `Tensor | QuantizedTensor`: a plain tensor is a list of itself

Annotations may name a base class or a leaf. A description of a result states the quantizer beside shape, dtype and
device; its stored fields follow from the declared layouts, by arithmetic on sizes that costs nothing where they are
symbolic.
"""

import functools
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from te_models.kernels.custom_op import Encoded, Kind, Output, Result, add_kind
from te_models.kernels.quantize.fp8.grouped import padded_length

from ..quantizer import Quantizer
from ..quantizer.delayed import Float8Quantizer
from ..quantizer.schema import FieldLayout, field_layouts
from ..quantizer.state import value_of
from ..tensor.formats import CLASSES, TENSOR_CLASSES
from ..tensor.grouped_storage import GroupedTensorStorage
from ..tensor.grouped_tensor import GroupedRows, GroupedTensor
from ..tensor.quantized_tensor import QuantizedTensor
from ..tensor.storage import QuantizedFields, QuantizedStorage
from .quantizer_string import quantizer_from_text, text_of

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
        return Encoded(str | None, lambda q: None if q is None else text_of(q), lambda t: t and quantizer_from_text(t))
    return Encoded(str, text_of, quantizer_from_text)


def _live_kind() -> Kind:
    parts = {"scale": Tensor, "amax": Tensor | None, "fp8_dtype": torch.dtype}
    return Kind(parts, lambda q: (q.scale, q.amax, q.fp8_dtype), lambda p: Float8Quantizer(*p), mutated=("amax",))


def _any_kind() -> Kind:
    def take(quantizer: Live) -> Sequence[Any]:
        value = value_of(quantizer)
        live: Any = quantizer
        return (None, None, value) if value is quantizer else (live.scale, live.amax, value)

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


# larger than any block in both dimensions, so that no field has a dimension of size 1
_ROWS, _COLUMNS, _GROUPS = 160, 288, 2


def field_outputs(
    quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, device: torch.device, groups: int | None = None
) -> list[Output]:
    """Describe the fields, in storage order, of a matrix [..., rows, columns], or with groups of rows [T, columns].

    dtype: of the values that are quantized. Sizes may be symbolic.
    """
    traits = _traits(quantizer, dtype, device, groups is not None)
    found = []
    for layout, (own, transposed) in zip(field_layouts(quantizer), traits, strict=True):
        found.append(Output(_size(quantizer, layout, shape, groups), own, device, transposed))
    return found


def _size(quantizer: Quantizer, layout: FieldLayout, shape: Sequence[int], groups: int | None) -> tuple[int, ...]:
    *batch, rows, columns = shape
    if groups is not None:
        rows = padded_length(rows, groups, quantizer.row_block(layout.usage))
        batch = [groups] if layout.block is None else []
    if layout.block is None:
        return tuple(batch)
    entries = [layout.entries(0, size, dim)[1] for size, dim in ((rows, -2), (columns, -1))]
    return (*batch, *(reversed(entries) if layout.transposed else entries))


@functools.lru_cache(maxsize=1024)
def _traits(
    quantizer: Quantizer, dtype: torch.dtype, device: torch.device, grouped: bool
) -> tuple[tuple[torch.dtype, bool], ...]:
    """Return dtype and whether the last two dimensions lie swapped, of each field, as the device's kernels make it."""
    # whatever traces this asks for an answer and is not to see how it was found
    with _disable_current_modes(), FakeTensorMode():
        key = torch.empty(2, dtype=torch.int64, device=device)
        if grouped:
            m_splits = torch.empty(_GROUPS, dtype=torch.int64, device=device)
            x = torch.empty(_ROWS, _COLUMNS, dtype=dtype, device=device)
            fields = quantizer.quantize_rows(x, m_splits, key)
        else:
            x = torch.empty(_GROUPS, _ROWS, _COLUMNS, dtype=dtype, device=device)
            fields = quantizer.quantize_fields(x, key)
        found = [fields[name] for name in quantizer.field_names()]
        return tuple((f.dtype, f.dim() > 1 and f.stride(-2) < f.stride(-1)) for f in found)


@dataclass(frozen=True)
class QuantizedResult(Result):
    """A new quantized value, a storage or (as_tensor) a QuantizedTensor, with the quantizer that is stated here.

    shape: logical, with G in front a stack of G members. m_splits: the argument by which it is rows sorted by group,
    [T, columns]; the result has this very tensor. A live quantizer makes fields of its value. amax_group: what the
    tensor's attribute of that name is to be: live, so the very object, too.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    quantizer: Live
    as_tensor: bool = False
    m_splits: Tensor | None = None
    amax_group: Any = None

    @property
    def value(self) -> Quantizer:
        """The quantizer whose fields the result has."""
        return value_of(self.quantizer)

    def count(self) -> int:
        return len(self.value.field_names())

    def _outputs(self) -> list[Output]:
        groups = None if self.m_splits is None else self.m_splits.shape[0]
        return field_outputs(self.value, self.shape, self.dtype, self.device, groups)

    def allocate(self) -> list[Tensor]:
        return [output.empty() for output in self._outputs()]

    def take(self, value: Any) -> list[Tensor]:
        if not isinstance(value, QuantizedFields) or isinstance(value, QuantizedTensor) is not self.as_tensor:
            kind = "QuantizedTensor" if self.as_tensor else "QuantizedStorage"
            raise RuntimeError(f"an operation returned a {type(value).__name__} where a {kind} is described")
        if (value.quantizer, tuple(value.shape)) != (self.value, tuple(self.shape)):
            raise RuntimeError(f"an operation returned {value!r} where {self.value} and {self.shape} are described")
        if getattr(value, "m_splits", None) is not self.m_splits:
            raise RuntimeError("an operation returned rows of other splits than the argument that is described")
        # a quantizer's element-wise operations keep the strides of what it quantizes; a description does not know them
        fields = zip(self._outputs(), value.fields.values(), strict=True)
        return [f.mT.contiguous().mT if output.transposed else f.contiguous() for output, f in fields]

    def make(self, tensors: Sequence[Tensor]) -> Any:
        shape, value = torch.Size(self.shape), self.value
        tensors = [*tensors, *([] if self.m_splits is None else [self.m_splits])]
        if not self.as_tensor:
            grouped = self.m_splits is not None or len(shape) == 3
            cls = GroupedTensorStorage if grouped else QuantizedStorage
            return cls.unflatten(tensors, (value, shape, self.dtype))
        cls = GroupedRows if self.m_splits is not None else TENSOR_CLASSES.get(value.FORMAT, QuantizedTensor)
        tensor = tensor_of(GroupedTensor if len(shape) == 3 else cls, tensors, value, shape, self.dtype)
        if self.amax_group is not None:
            tensor.amax_group = self.amax_group
        return tensor


def quantized_like(x: Tensor | Output, quantizer: Live, **options: Any) -> QuantizedResult:
    """Describe the quantization of x: the shape and device of x, and x's dtype as the logical dtype.

    options: the other fields of `QuantizedResult`.
    """
    return QuantizedResult(x.shape, x.dtype, x.device, quantizer, **options)
