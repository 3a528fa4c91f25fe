"""Quantized results of registered operations: a description states the quantizer beside shape, dtype and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_models.kernels.registry import Output, Result

from .field_outputs import field_outputs
from .grouped_storage import GroupedTensorStorage
from .grouped_tensor import GroupedRows, GroupedTensor
from .op_arguments import Live, tensor_of
from .quantized_storage import QuantizedFields, QuantizedStorage
from .quantized_tensor import QuantizedTensor
from .quantizer import Quantizer
from .tensor_classes import TENSOR_CLASSES


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
        return self.quantizer if isinstance(self.quantizer, Quantizer) else self.quantizer.value

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
        cls = GroupedRows if self.m_splits is not None else TENSOR_CLASSES[value.FORMAT]
        made = tensor_of(GroupedTensor if len(shape) == 3 else cls, tensors, value, shape, self.dtype)
        if self.amax_group is not None:
            made.amax_group = self.amax_group
        return made


def quantized_like(x: Tensor | Output, quantizer: Live, **options: Any) -> QuantizedResult:
    """Describe x quantized: its shape and device, its dtype as the logical one. options: see `QuantizedResult`."""
    return QuantizedResult(x.shape, x.dtype, x.device, quantizer, **options)
