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
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.quantize.fp8.dequantize_grouped import dequantize_grouped, unpad_rows

from ..quantizer import (
    Fields,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    Usage,
)
from ..quantizer.delayed import Float8Quantizer
from ..quantizer.group_offsets import RowGroups
from ..quantizer.schema import field_layouts


def row_alignment(quantizer: Quantizer, usage: Usage) -> int:
    """Return the multiple of rows at which groups begin in the copy stored for `usage`; 1: the T rows that came in."""
    return quantizer.row_block(usage)


def quantize_rows(
    quantizer: Quantizer | Float8Quantizer,
    x: Tensor,
    m_splits: Tensor,
    key: Tensor | None = None,
    usages: tuple[Usage, ...] | None = None,
) -> Fields:
    """Quantize x: [T, C] group by group into the stored fields. m_splits: [G] integer. key: see `Quantizer`. A live
    quantizer has a scale, and records an amax, for each group.

    usages: of the copies that are stored, those to make; None: all of them.
    """
    if isinstance(quantizer, Float8Quantizer):
        return per_tensor_copies(quantizer, x, m_splits)[0]
    usages = quantizer.stored_usages() if usages is None else usages
    rowwise, columnwise = (usage in usages for usage in ("rowwise", "columnwise"))
    match quantizer:
        case HybridQuantizer():
            fields: Fields = {}
            for usage in usages:
                for name, field in quantize_rows(quantizer.member(usage), x, m_splits, key).items():
                    fields[f"{usage}_{name.partition('_')[2]}"] = field
            return fields
        case IdentityQuantizer():
            return {"rowwise_data": x.clone()}
        case Float8CurrentScalingQuantizer():
            return per_tensor_copies(quantizer, x, m_splits)[0]
        case Float8BlockQuantizer() | MXFP8Quantizer():
            epsilon = quantizer.amax_epsilon if isinstance(quantizer, Float8BlockQuantizer) else 0.0  # MX has none
            parts = q.quantize_grouped_blockwise(
                x,
                m_splits,
                quantizer.block,
                quantizer.fp8_dtype,
                quantizer.scale_kind,
                epsilon=epsilon,
                rowwise=rowwise,
                columnwise=columnwise,
            )
            layouts = [layout for layout in field_layouts(quantizer) if layout.usage in usages]
            return {f.name: part.mT if f.transposed else part for f, part in zip(layouts, parts, strict=True)}
        case NVFP4Quantizer(with_2d_quantization=False):
            key = quantizer.checked_key(key)
            parts = q.quantize_grouped_nvfp4(
                x, m_splits, with_rht=quantizer.with_rht, key=key, rowwise=rowwise, columnwise=columnwise
            )
            names = [name for name in quantizer.field_names() if name.partition("_")[0] in usages]
            return dict(zip(names, parts, strict=True))
    raise ValueError(
        f"rows of groups cannot be quantized by {quantizer}; for NVFP4, with_2d_quantization is of weights"
    )


def per_tensor_copies(
    quantizer: Float8Quantizer | Float8CurrentScalingQuantizer,
    x: Tensor,
    m_splits: Tensor,
    *,
    align: int = 1,
    columnwise: bool = False,
) -> list[Fields]:
    """Quantize x: [T, C] with one scale per group: the fields of the T rows, and if `columnwise` those of a copy in
    padded rows, in which groups begin at multiples of `align`. A live quantizer records its amaxes."""
    amax = q.grouped_amax(x, m_splits)
    if isinstance(quantizer, Float8Quantizer):
        scale = quantizer.group_scales(m_splits.shape[0])
        quantizer.record(amax)
    else:
        scale = quantizer.scale(amax)
    flags = {"align": align, "columnwise": columnwise}
    scale_inv = torch.div(torch.ones_like(scale), scale)
    copies = q.quantize_grouped_per_tensor(x, m_splits, scale, quantizer.fp8_dtype, **flags)
    return [{"rowwise_data": data, "rowwise_scale_inv": scale_inv} for data in copies]


def empty_rows(
    quantizer: Quantizer, shape: torch.Size, groups: int, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Fields:
    """Return uninitialised fields for `groups` groups of rows, x's shape [T, C] and dtype."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    key = torch.empty(2, dtype=torch.int64, device="meta")
    specs = quantize_rows(quantizer, meta, torch.empty(groups, dtype=torch.int64, device="meta"), key)
    return {name: torch.empty_like(field, device=device) for name, field in specs.items()}


def dequantize_rows(
    quantizer: Quantizer, fields: Fields, m_splits: Tensor, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Return the values, [T, C] in `dtype`; rows past the last group are zero."""
    usage = quantizer.stored_usages()[0]
    if isinstance(quantizer, HybridQuantizer):
        member = quantizer.member(usage).with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
        stored = member.stored_usages()[0]
        renamed = {f"{stored}_{part}": fields[f"{usage}_{part}"] for part in member.PARTS}
        return dequantize_rows(member, renamed, m_splits, shape, dtype)
    rows = RowGroups.of(m_splits, shape[0])
    parts = [fields[f"{usage}_{part}"] for part in quantizer.PARTS]
    match quantizer:
        case IdentityQuantizer():
            return torch.where((rows.group < rows.num_groups)[:, None], parts[0], 0).to(dtype)
        case Float8CurrentScalingQuantizer():
            data, scale_inv = parts
            return dequantize_grouped(data, scale_inv, m_splits, shape[0], None, dtype)
        case Float8BlockQuantizer() | MXFP8Quantizer():
            turned = usage == "columnwise" and field_layouts(quantizer)[0].transposed
            data, scale_inv = (part.mT if turned else part for part in parts)
            return dequantize_grouped(data, scale_inv, m_splits, shape[0], quantizer._block_of(usage), dtype)
        case NVFP4Quantizer():
            return _dequantize_nvfp4(quantizer, usage, parts, rows, shape, dtype)
    raise ValueError(f"rows of groups cannot be quantized by {quantizer}")


def _dequantize_nvfp4(
    quantizer: NVFP4Quantizer, usage: Usage, parts: list[Tensor], rows: RowGroups, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    packed, scales, amax = parts
    if shape.numel() == 0:
        return packed.new_empty(shape, dtype=dtype)
    if usage == "rowwise":
        values = q.dequantize_nvfp4(packed, scales, rows.per_row(amax)[:, None], shape[1], dtype)
        return torch.where((rows.group < rows.num_groups)[:, None], values, 0)
    align = row_alignment(quantizer, usage)
    padded = rows.padded(align).groups()
    values = q.decode_blocks(packed, scales, packed.shape[1] * 2).mT * padded.per_row(q.global_decode(amax))[:, None]
    if quantizer.with_rht:
        values = q.inverse_random_hadamard(values, -2)
    return unpad_rows(values, rows.m_splits, align, shape[0]).to(dtype)


def member_of_rows(quantizer: Quantizer, fields: Fields, splits: Sequence[int], index: int) -> Fields:
    """Return the fields of one group as views: those of its rows quantized by themselves. splits: m_splits' values."""
    found: Fields = {}
    for layout in field_layouts(quantizer):
        field = fields[layout.name]
        if layout.block is None:
            found[layout.name] = field[index]
            continue
        align = row_alignment(quantizer, layout.usage)
        begin = sum(-(-m // align) * align for m in splits[:index])
        found[layout.name] = field.narrow(layout.axis(-2), *layout.entries(begin, begin + splits[index], -2))
    return found
