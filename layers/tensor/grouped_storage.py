"""The bare fields of a grouped tensor: members of one shape, or of as many rows as splits on the device say.

Rows sorted by group are quantized group by group. Nothing here reads the splits; `member_of_rows` is told them. T rows,
P padded rows, G groups. The format's fields lie in the layout that `schema` declares, with two differences. A copy
whose blocks span several rows (every columnwise copy, except in a format with one scale per matrix) is in padded rows:
a group begins at a multiple of the block's rows and is followed by zeros up to the next one, so that no block spans two
groups; P is a function of the shapes. What a matrix has once, every group has once, [G]. So a member's fields are
slices, with the very bits that quantizing its rows by themselves gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..quantizer import Fields, Quantizer
from ..quantizer.delayed import Float8Quantizer
from ..quantizer.schema import empty_fields, field_layouts
from ..quantizer.state import value_of
from .storage import QuantizedStorage


def empty_rows(
    quantizer: Quantizer, shape: torch.Size, groups: int, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Fields:
    """Return uninitialised fields for `groups` groups of rows, x's shape [T, C] and dtype."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    key = torch.empty(2, dtype=torch.int64, device="meta")
    specs = quantizer.quantize_rows(meta, torch.empty(groups, dtype=torch.int64, device="meta"), key)
    return {name: torch.empty_like(field, device=device) for name, field in specs.items()}


def member_of_rows(quantizer: Quantizer, fields: Fields, splits: Sequence[int], index: int) -> Fields:
    """Return one group's fields as views: what its rows, quantized by themselves, have. splits: m_splits' values."""
    found: Fields = {}
    for layout in field_layouts(quantizer):
        field = fields[layout.name]
        if layout.block is None:
            found[layout.name] = field[index]
            continue
        align = quantizer.row_block(layout.usage)
        begin = sum(-(-m // align) * align for m in splits[:index])
        found[layout.name] = field.narrow(layout.axis(-2), *layout.entries(begin, begin + splits[index], -2))
    return found


class GroupedTensorStorage(QuantizedStorage):
    """`GroupedTensorStorage(fields, quantizer, shape, dtype, m_splits=None, amaxes=None)`: fields of all members, in
    any format. m_splits None: logical shape [num_gemms, rows, columns], fields stacked;
    else [T, columns] with m_splits: [num_gemms] integer rows per group, fields as above. amaxes: of each member [G], by
    usage, where whoever made this passed on what the scales come from. ValueError for a shape of another rank."""

    def __init__(
        self,
        fields: Fields,
        quantizer: Quantizer,
        shape: torch.Size,
        dtype: torch.dtype,
        m_splits: Tensor | None = None,
        amaxes: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(fields, quantizer, shape, dtype)
        self.m_splits = m_splits
        self._amaxes = dict(amaxes or {})
        vars(self).setdefault("columnwise_amax", self._amaxes.get("columnwise"))
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

    @property
    def amax(self) -> Tensor | None:
        """The amaxes that the scales of the rowwise copies come from, [G]; columnwise_amax has the amaxes of the
        columnwise copies; None where they are not stored."""
        return self.fields.get("rowwise_amax", self._amaxes.get("rowwise"))

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
        m_splits = tensors[len(names)] if len(tensors) > len(names) else None
        return GroupedTensorStorage(fields, quantizer, shape, dtype, m_splits)
