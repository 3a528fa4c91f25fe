"""Quantized results of registered operations: a description states the quantizer beside shape, dtype and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_models.kernels.registry import Result

from .grouped_storage import GroupedTensorStorage
from .grouped_tensor import GroupedRows, GroupedTensor
from .op_arguments import Live, tensor_of, tensors_of
from .quantized_storage import QuantizedFields, QuantizedStorage
from .quantized_tensor import TENSOR_CLASSES, QuantizedTensor
from .quantizer import Quantizer


@dataclass(frozen=True)
class Quantized(Result):
    """A new quantized value, a storage or (as_tensor) a QuantizedTensor, with the quantizer that is stated here.

    shape: logical, with G in front a stack of G members; groups: rows sorted by group, [T, columns], of so many groups.
    A live quantizer makes fields of its value. amax_group: what the tensor's attribute of that name is to be: live, so
    the very object and no copy of it.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    quantizer: Live
    as_tensor: bool = False
    groups: int | None = None
    amax_group: Any = None

    @property
    def value(self) -> Quantizer:
        """The quantizer whose fields the result has."""
        return self.quantizer if isinstance(self.quantizer, Quantizer) else self.quantizer.value

    def count(self) -> int:
        return len(self.value.field_names()) + (self.groups is not None)

    def allocate(self) -> list[Tensor]:
        shape, value = torch.Size(self.shape), self.value
        if self.groups is not None:
            return GroupedTensorStorage.empty(shape, value, self.dtype, self.device, self.groups).flatten()[0]
        return QuantizedStorage.empty(shape, value, self.dtype, self.device).flatten()[0]

    def take(self, value: Any) -> list[Tensor]:
        if not isinstance(value, QuantizedFields) or isinstance(value, QuantizedTensor) is not self.as_tensor:
            kind = "QuantizedTensor" if self.as_tensor else "QuantizedStorage"
            raise RuntimeError(f"an operation returned a {type(value).__name__} where a {kind} is described")
        if value.quantizer != self.value:
            raise RuntimeError(f"an operation returned {value.quantizer} where {self.value} is described")
        return tensors_of(value)

    def make(self, tensors: Sequence[Tensor]) -> Any:
        shape, value = torch.Size(self.shape), self.value
        if not self.as_tensor:
            grouped = self.groups is not None or len(shape) == 3
            cls = GroupedTensorStorage if grouped else QuantizedStorage
            return cls.unflatten(list(tensors), (value, shape, self.dtype))
        cls = GroupedRows if self.groups is not None else TENSOR_CLASSES[value.FORMAT]
        made = tensor_of(GroupedTensor if len(shape) == 3 else cls, tensors, value, shape, self.dtype)
        if self.amax_group is not None:
            made.amax_group = self.amax_group
        return made


def quantized_like(x: Tensor | Result, quantizer: Live, **options: Any) -> Quantized:
    """Describe x quantized: its shape and device, its dtype as the logical one. options: see `Quantized`."""
    return Quantized(x.shape, x.dtype, x.device, quantizer, **options)
