"""What a quantized format stores: one declaration per format, from which flattening, copies, views, allocation,
sharding and checkpoint entries follow.

Field names are `{usage}_{part}`: rowwise_data, rowwise_scale_inv, columnwise_data, ... Which of them exist is derived
from the quantizer value every time (`Quantizer.field_names`), never carried as a flag that could go stale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import Fields, Quantizer, Usage
from .encoding import WHOLE_ROW


@dataclass(frozen=True)
class FieldLayout:
    """Where one field lies over the matrix.

    dtype: None where it is the tensor's logical one. block: matrix (rows, columns) per entry, None for one entry per
    matrix; transposed: stored as [columns, rows]; transposed_view: see `Schema`; row_multiple: the field covers the
    rows rounded up to a multiple of this.
    """

    name: str
    usage: Usage
    dtype: torch.dtype | None
    block: tuple[int, int] | None
    transposed: bool
    transposed_view: bool = False
    row_multiple: int = 1

    def empty(self, matrix: torch.Size, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return the field of a matrix [..., rows, columns] of logical `dtype`, uninitialised."""
        shape = matrix[:-2]
        if self.block is not None:
            size = [self.entries(0, matrix[dim], dim)[1] for dim in (-2, -1)]
            shape += tuple(reversed(size) if self.transposed and not self.transposed_view else size)
        field = torch.empty(shape, dtype=self.dtype or dtype, device=device)
        return field.mT if self.transposed and self.transposed_view else field

    def axis(self, dim: int) -> int:
        """Return the field's own axis (-2 or -1) for the matrix dimension `dim` (-2 or -1)."""
        return -3 - dim if self.transposed else dim

    def entries(self, start: int, stop: int, dim: int) -> tuple[int, int]:
        """Return (first, count) of the entries for matrix indices start..stop along `dim` (-2 or -1); needs a block."""
        assert self.block is not None, "one entry per matrix has no position"
        size = self.block[dim]
        if dim == -2:
            stop = start + -(-(stop - start) // self.row_multiple) * self.row_multiple
        return start // size, -(-stop // size) - start // size


def high_precision_fields(quantizer: Quantizer) -> set[str]:
    """Return the names of the fields that hold values in high precision: the fields of identity quantizers."""
    members = {usage: quantizer.member(usage) for usage in quantizer.stored_usages()}
    return {f"{usage}_data" for usage, member in members.items() if member.FORMAT == "identity"}


def field_layouts(quantizer: Quantizer) -> tuple[FieldLayout, ...]:
    """Return the layout of every stored field, in storage order."""
    layouts: list[FieldLayout] = []
    for usage in quantizer.stored_usages():
        member = quantizer.member(usage)
        # the one copy of a symmetric format lies as a rowwise one, whatever it serves
        columnwise = usage == "columnwise" and not member.symmetric
        schema = member.SCHEMA
        for part in member.PARTS:
            scale = schema.scale_block or member.block
            block = {"data": (1, schema.values_per_entry), "scale_inv": scale, "zero_point": scale}.get(part)
            if part == "amax" and member.row_scaled:
                block = (1, WHOLE_ROW)
            if columnwise and block is not None:
                block = (block[1], block[0])
            transposed = columnwise and schema.columnwise_transposed
            rotated = member.transformed and usage == "columnwise"
            dtype = member.part_dtype(part)
            view, multiple = schema.transposed_view, 16 if rotated else 1
            layouts.append(FieldLayout(f"{usage}_{part}", usage, dtype, block, transposed, view, multiple))
    return tuple(layouts)


def cut_multiple(quantizer: Quantizer, dim: int) -> int:
    """Return the multiple at which a matrix may be cut along `dim` (-2 or -1) without cutting a block or a byte.

    All blocks are powers of two, so the largest one decides.
    """
    sizes = [layout.block[dim] for layout in field_layouts(quantizer) if layout.block is not None]
    for usage in quantizer.stored_usages():
        member = quantizer.member(usage)
        if member.block is not None:
            # a scale may be written once for each row that shares it: the block is larger than what an entry covers
            sizes.append(member.block[-3 - dim if usage == "columnwise" and not member.symmetric else dim])
    return max(sizes)


def empty_fields(
    quantizer: Quantizer, shape: torch.Size, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Fields:
    """Return uninitialised fields for a matrix of `shape`: [..., rows, columns] and logical `dtype`; a format that
    keeps values as they are stores its fields in that dtype."""
    return {layout.name: layout.empty(shape, dtype, device) for layout in field_layouts(quantizer)}
