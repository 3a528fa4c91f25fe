"""Matrices of different shapes, quantized alike and stored together: one buffer per field, one matrix after the other.

Every member is quantized by itself, with the bits that its quantizer gives it alone; its fields are views of the
buffers. Where only the rows differ, `GroupedTensorStorage` with m_splits is the form that layers take.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..quantizer import Fields, Quantizer
from ..quantizer.schema import empty_fields
from ..tensor.formats import TENSOR_CLASSES
from ..tensor.quantized_tensor import QuantizedTensor


class MixedShapesStorage:
    """quantizer, dtype: of all members; shapes: (rows, columns) of each. buffers: name of a field -> [entries of all
    members]. ValueError for a shape that is no matrix, and for values that do not fit."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], quantizer: Quantizer, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Make uninitialised buffers."""
        self.shapes = [torch.Size(shape) for shape in shapes]
        for shape in self.shapes:
            if len(shape) != 2:
                raise ValueError(f"shapes has {tuple(shape)}; allowed: (rows, columns) of each member")
        self.quantizer, self.dtype = quantizer, dtype
        layouts = [empty_fields(quantizer, shape, "meta", dtype) for shape in self.shapes]
        self.buffers: Fields = {}
        members: list[Fields] = [{} for _ in self.shapes]
        for name in quantizer.field_names():
            specs = [fields[name] for fields in layouts]
            sizes = [spec.numel() for spec in specs]
            own = specs[0].dtype if specs else torch.uint8
            buffer = self.buffers[name] = torch.empty(sum(sizes), dtype=own, device=device)
            for fields, spec, part in zip(members, specs, buffer.split(sizes), strict=True):
                fields[name] = part.as_strided(spec.shape, spec.stride())
        cls = TENSOR_CLASSES.get(quantizer.FORMAT, QuantizedTensor)
        self._members = [cls(f, quantizer, s, dtype) for f, s in zip(members, self.shapes, strict=True)]

    @property
    def num_tensors(self) -> int:
        """The number of members."""
        return len(self.shapes)

    @property
    def amax(self) -> Tensor | None:
        """The amaxes of the rowwise copies, one per member; None where they are not stored."""
        return self.buffers.get("rowwise_amax")

    @property
    def columnwise_amax(self) -> Tensor | None:
        """The amaxes of the columnwise copies, one per member; None where they are not stored."""
        return self.buffers.get("columnwise_amax")

    def split_into_quantized_tensors(self) -> list[Any]:
        """Return the members as tensors that share the buffers."""
        return list(self._members)

    def quantize(self, tensors: Sequence[Tensor], *, noop_flag: Tensor | None = None) -> list[Any]:
        """Quantize a tensor of its shape into each member and return the members. noop_flag: a scalar tensor; where it
        is nonzero nothing changes."""
        if len(tensors) != self.num_tensors:
            raise ValueError(f"tensors has {len(tensors)} entries; allowed: {self.num_tensors}, one per member")
        for member, values in zip(self._members, tensors, strict=True):
            member.quantize_(values, noop=noop_flag)
        return list(self._members)

    def dequantize(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the values of each member."""
        return [member.dequantize(dtype) for member in self._members]
