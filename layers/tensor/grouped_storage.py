"""The bare fields of a grouped tensor: members of one shape, or of as many rows as splits on the device say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quantizer import Fields, Quantizer
from ..quantizer.delayed import Float8Quantizer
from ..quantizer.schema import empty_fields
from ..quantizer.state import value_of
from .grouped_rows import empty_rows
from .storage import QuantizedStorage


class GroupedTensorStorage(QuantizedStorage):
    """Fields of all members, in any format. m_splits None: logical shape [num_gemms, rows, columns], fields stacked;
    else [T, columns] with m_splits: [num_gemms] integer rows per group, fields as `grouped_rows` says. ValueError for a
    shape of another rank."""

    def __init__(
        self,
        fields: Fields,
        quantizer: Quantizer,
        shape: torch.Size,
        dtype: torch.dtype,
        m_splits: Tensor | None = None,
    ) -> None:
        super().__init__(fields, quantizer, shape, dtype)
        self.m_splits = m_splits
        if len(self.shape) != (3 if m_splits is None else 2):
            wanted = "[num_gemms, rows, columns]" if m_splits is None else "[rows, columns] beside m_splits"
            raise ValueError(f"{type(self).__name__} has shape {tuple(shape)}; allowed: {wanted}")

    @classmethod
    def quantize(
        cls,
        x: Tensor,
        quantizer: Quantizer | Float8Quantizer,
        m_splits: Tensor | None = None,
        key: Tensor | None = None,
    ) -> GroupedTensorStorage:
        """Return x quantized: [num_gemms, rows, columns], or [T, columns] with m_splits. key: for stochastic
        rounding."""
        x = x.detach()
        if m_splits is None:
            fields = quantizer.quantize_fields(x, key)
        else:
            fields = quantizer.quantize_rows(x, m_splits, key)
        return cls(fields, value_of(quantizer), x.shape, x.dtype, m_splits)

    @classmethod
    def empty(
        cls,
        shape: torch.Size,
        quantizer: Quantizer,
        dtype: torch.dtype,
        device: torch.device | str,
        groups: int | None = None,
    ) -> GroupedTensorStorage:
        """Return uninitialised fields; groups: of rows [T, columns], all of them empty."""
        if groups is None:
            return cls(empty_fields(quantizer, torch.Size(shape), device, dtype), quantizer, shape, dtype)
        m_splits = torch.zeros(groups, dtype=torch.int64, device=device)
        return cls(empty_rows(quantizer, torch.Size(shape), groups, device, dtype), quantizer, shape, dtype, m_splits)

    @property
    def num_gemms(self) -> int:
        """The number of members."""
        return self.shape[0] if self.m_splits is None else self.m_splits.shape[0]

    def decode(self, dtype: torch.dtype) -> Tensor:
        if self.m_splits is None:
            return super().decode(dtype)
        return self.quantizer.dequantize_rows(self.fields, self.m_splits, self.shape, dtype)

    def flatten(self) -> tuple[list[Tensor], tuple[Any, ...]]:
        splits = [] if self.m_splits is None else [self.m_splits]
        return [*self.fields.values(), *splits], (self.quantizer, self.shape, self.dtype)

    @staticmethod
    def unflatten(tensors: list[Tensor], meta: tuple[Any, ...]) -> GroupedTensorStorage:
        """Undo `flatten`."""
        quantizer, shape, dtype = meta
        names = quantizer.field_names()
        fields = dict(zip(names, tensors, strict=False))
        return GroupedTensorStorage(fields, quantizer, shape, dtype, *tensors[len(names) :])
