"""Quantized storages: the bare fields of a quantized tensor with a logical shape and dtype, and what storages share
with the tensors of `quantized_tensor`, the `torch.Tensor` subclasses that wrap the same fields."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand

from ..quantizer import Fields, Quantizer, Usage
from ..quantizer.delayed import Float8Quantizer
from ..quantizer.schema import FieldLayout, empty_fields, field_layouts
from ..quantizer.state import value_of


class QuantizedFields:
    """Base of storages and tensors. Attributes: `quantizer`, and one tensor per name in `quantizer.field_names()`.

    `shape` and `dtype` are the logical ones. `matrix_shape` [..., rows, columns] is the shape that was quantized; it
    differs from `shape` in a view only.
    """

    quantizer: Quantizer
    matrix_shape: torch.Size
    shape: Any
    dtype: Any

    def _adopt(self, fields: Fields, quantizer: Quantizer, matrix_shape: torch.Size) -> None:
        self.quantizer = quantizer
        self.matrix_shape = matrix_shape
        for name in quantizer.field_names():
            setattr(self, name, fields[name])

    @property
    def fields(self) -> Fields:
        """The stored tensors by name; the tensors themselves, not copies."""
        return {name: getattr(self, name) for name in self.quantizer.field_names()}

    @property
    def layouts(self) -> tuple[FieldLayout, ...]:
        """The layout of every stored field, in storage order."""
        return field_layouts(self.quantizer)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the matrix in `dtype`, never one of the fields itself."""
        fields = self.fields
        values = self.quantizer.dequantize_fields(fields, dtype, self.matrix_shape)
        return values.clone() if any(values is field for field in fields.values()) else values

    def operand(self, usage: Usage, dtype: torch.dtype) -> Operand:
        """Return the matrix as the operand of a GEMM, exactly as stored. ValueError for a view of another shape."""
        self.require_matrix("be the operand of a GEMM")
        return self.quantizer.operand_of_fields(self.fields, usage, dtype, self.matrix_shape)

    def require_matrix(self, what: str) -> None:
        """Raise ValueError where this is a view of another shape than the matrix that was quantized."""
        if self.shape != self.matrix_shape:
            raise ValueError(
                f"a view of shape {tuple(self.shape)} of a quantized {tuple(self.matrix_shape)} cannot {what}"
            )


class QuantizedStorage(QuantizedFields):
    """Bare fields: what crosses an op boundary or is saved for backward. A leaf class names each format."""

    def __init__(self, fields: Fields, quantizer: Quantizer, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._adopt(fields, quantizer, self.shape)

    @classmethod
    def quantize(cls, x: Tensor, quantizer: Quantizer | Float8Quantizer, key: Tensor | None = None) -> QuantizedStorage:
        """Return x: [..., rows, columns] quantized, in the class of the quantizer's format. key: for stochastic
        rounding."""
        fields = quantizer.quantize_fields(x.detach(), key)
        return storage_of(fields, value_of(quantizer), x.shape, x.dtype)

    @classmethod
    def empty(
        cls, shape: torch.Size, quantizer: Quantizer, dtype: torch.dtype, device: torch.device | str
    ) -> QuantizedStorage:
        """Return uninitialised fields for a matrix of this logical shape and dtype."""
        fields = empty_fields(quantizer, torch.Size(shape), device, dtype)
        return storage_of(fields, quantizer, shape, dtype)

    @property
    def device(self) -> torch.device:
        """The device of the fields."""
        return next(iter(self.fields.values())).device

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values in `dtype` (None: the logical dtype). Not differentiable."""
        return self.decode(dtype or self.dtype)

    def flatten(self) -> tuple[list[Tensor], tuple[Any, ...]]:
        """Return (tensors, meta): the tensors for a schema that knows only tensors, the rest as one constant."""
        return list(self.fields.values()), (self.quantizer, self.shape, self.dtype)

    @staticmethod
    def unflatten(tensors: list[Tensor], meta: tuple[Any, ...]) -> QuantizedStorage:
        """Undo `flatten`, in the class of the quantizer's format."""
        quantizer, shape, dtype = meta
        fields = dict(zip(quantizer.field_names(), tensors, strict=True))
        return storage_of(fields, quantizer, shape, dtype)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"quantizer={self.quantizer})"
        )


class Float8TensorStorage(QuantizedStorage):
    """FP8 with one scale; fields as `Float8CurrentScalingQuantizer` says."""


class Float8BlockwiseTensorStorage(QuantizedStorage):
    """FP8 with a scale per 1x128 or 128x128 block; fields as `Float8BlockQuantizer` says."""


class MXFP8TensorStorage(QuantizedStorage):
    """FP8 with a power-of-two scale byte per 32 values; fields as `MXFP8Quantizer` says."""


class NVFP4TensorStorage(QuantizedStorage):
    """FP4 with an FP8 scale per 16 values and one amax; fields as `NVFP4Quantizer` says."""


class Int4TensorStorage(QuantizedStorage):
    """Integers of four bits with a scale per group of a row; fields as `Int4Quantizer` says."""


class Int8TensorStorage(QuantizedStorage):
    """Integers of eight bits with a scale per group of a row; fields as `Int8Quantizer` says."""


class IdentityTensorStorage(QuantizedStorage):
    """High precision; the field is `rowwise_data`."""


class HybridTensorStorage(QuantizedStorage):
    """A format for each usage; fields as `HybridQuantizer` says."""


STORAGE_CLASSES: dict[str, type[QuantizedStorage]] = {
    "float8": Float8TensorStorage,
    "float8_block": Float8BlockwiseTensorStorage,
    "mxfp8": MXFP8TensorStorage,
    "nvfp4": NVFP4TensorStorage,
    "int4": Int4TensorStorage,
    "int8": Int8TensorStorage,
    "identity": IdentityTensorStorage,
    "hybrid": HybridTensorStorage,
}
"""Format -> the class of bare fields; of a format without one `QuantizedStorage`."""


def storage_of(fields: Fields, quantizer: Quantizer, shape: Any, dtype: torch.dtype) -> QuantizedStorage:
    """Return fields as the storage of their quantizer's format. shape, dtype: the logical ones."""
    return STORAGE_CLASSES.get(quantizer.FORMAT, QuantizedStorage)(fields, quantizer, shape, dtype)
