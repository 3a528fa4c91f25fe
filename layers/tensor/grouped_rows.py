"""Rows sorted by group, every group quantized by itself: the fields of a quantized tensor whose members have as many
rows as device-side splits say. Nothing here reads the splits, but for `member_of_rows`, which is told them.

T rows, P padded rows, G groups. The fields are those of the format, in the layout that `field_schema` declares, with
two differences. A copy whose blocks span several rows (every columnwise one but that of a format with one scale per
matrix) is in padded rows: a group begins at a multiple of the block's rows and is followed by zeros up to the next one,
so that no block spans two groups; P is a function of the shapes. What a matrix has once, every group has once, [G].
So a member's fields are slices, with the very bits that quantizing its rows by themselves gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..quantizer import Fields, Quantizer
from ..quantizer.schema import field_layouts


def empty_rows(
    quantizer: Quantizer, shape: torch.Size, groups: int, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Fields:
    """Return uninitialised fields for `groups` groups of rows, x's shape [T, C] and dtype."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    key = torch.empty(2, dtype=torch.int64, device="meta")
    specs = quantizer.quantize_rows(meta, torch.empty(groups, dtype=torch.int64, device="meta"), key)
    return {name: torch.empty_like(field, device=device) for name, field in specs.items()}


def member_of_rows(quantizer: Quantizer, fields: Fields, splits: Sequence[int], index: int) -> Fields:
    """Return the fields of one group as views: those of its rows quantized by themselves. splits: m_splits' values."""
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
