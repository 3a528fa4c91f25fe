"""Rows sorted by group as sides of grouped GEMMs, and what fprop leaves of its input for wgrad.

Where GEMMs take quantized numbers, rows are quantized once for all the GEMMs that take them: one kernel makes both
copies from the splits on the device, the padding that wgrad's copy needs included. Eagerly on a CPU the input is, too,
so that its quantized copy is kept and not itself. In a CPU graph, and for gradients on a CPU, every operand is made
from a padded copy of the rows, which the compiler fuses (`apart`).

T rows, P padded rows, C columns, G groups. align: of the rows that wgrad contracts, see `grouped_gemms.alignment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.kernels.gemm import Operand

from ..quantizer import (
    Fields,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Usage,
)
from ..quantizer.delayed import Float8Quantizer, value_of
from ..quantizer.group_offsets import PaddedRows, RowGroups
from ..recipe.base import BackwardOverride
from ..tensor.grouped_rows import dequantize_rows, per_tensor_copies, quantize_rows
from ..tensor.grouped_tensor import GroupedRows
from .gemm_operand import AnyQuantizer, Side, quantized_gemms, side_of_fields, turned, values_side
from .quantized_rows import fprop_side, wgrad_side
from .saved_input import Kept, in_cpu_graph


class RowsSide(NamedTuple):
    """Rows as one side of a grouped GEMM. padding: where they lie; None: in the T rows that came in."""

    side: Side
    padding: PaddedRows | None


def padded(rows: RowGroups, align: int) -> PaddedRows | None:
    """Return where rows lie when groups begin at multiples of `align`; None: where they lay before."""
    return None if align == 1 else rows.padded(align)


def maker(quantizer: AnyQuantizer, usage: Usage) -> AnyQuantizer:
    """Return the quantizer that makes the copy for a usage."""
    return quantizer.member(usage) if isinstance(quantizer, HybridQuantizer) else quantizer


def _row_align(quantizer: AnyQuantizer, usage: Usage, align: int) -> int:
    """Return the alignment of the rows of a side."""
    return align if usage == "columnwise" else quantizer.row_block("rowwise")


def copied(quantizer: AnyQuantizer, usage: Usage, align: int) -> bool:
    """Whether `copies` makes the copy for a usage: in a format of grouped rows, with blocks of as many rows as are
    aligned."""
    made = maker(quantizer, usage)
    if isinstance(made, IdentityQuantizer) or (isinstance(made, NVFP4Quantizer) and made.with_2d_quantization):
        return False
    if not made.symmetric and usage not in value_of(made).stored_usages():
        return False
    return usage == "rowwise" or made.row_block(usage) in (1, align)


def copies(
    quantizer: AnyQuantizer,
    x: Tensor,
    rows: RowGroups,
    usages: tuple[Usage, ...],
    align: int,
    key: Tensor | None = None,
) -> dict[Usage, Fields]:
    """Quantize x: [T, C] group by group, in one pass for all usages, and return for each the fields, under the names of
    its `maker`, that a GEMM takes. Live quantizers record their amaxes."""
    if isinstance(quantizer, HybridQuantizer):
        return {u: copies(quantizer.member(u), x, rows, (u,), align, key)[u] for u in usages}
    if isinstance(quantizer, Float8Quantizer | Float8CurrentScalingQuantizer):
        apart = "columnwise" in usages and align > 1
        made = per_tensor_copies(quantizer, x, rows.m_splits, align=align, columnwise=apart)
        return {usage: made[-1 if usage == "columnwise" else 0] for usage in usages}
    stored: tuple[Usage, ...] = ("rowwise",) if quantizer.symmetric else usages
    fields = quantize_rows(quantizer, x, rows.m_splits, key, stored)
    return dict.fromkeys(usages, fields)


def _side_of_copy(
    quantizer: AnyQuantizer,
    fields: Fields,
    usage: Usage,
    dtype: torch.dtype,
    shape: Sequence[int],
    padding: PaddedRows | None,
) -> Side:
    """Return a copy of rows as a side. shape: [T, C], that of the rows before `padding`."""
    rows = shape[0] if padding is None else padding.used.shape[0]
    return side_of_fields(value_of(maker(quantizer, usage)), fields, usage, dtype, (rows, shape[1]))


def apart(
    quantizer: AnyQuantizer,
    x: Tensor,
    usage: Usage,
    dtype: torch.dtype,
    rows: RowGroups,
    align: int,
    key: Tensor | None = None,
) -> RowsSide:
    """Quantize x: [T, C] for one GEMM, from a padded copy where it wants one."""
    padding = padded(rows, _row_align(quantizer, usage, align))
    if padding is not None:
        x, rows = padding.pad(x), padding.groups()
    made = maker(quantizer, usage)
    if quantized_gemms(x.device) and isinstance(made, Float8BlockQuantizer | MXFP8Quantizer):
        scaled = made.scaled_operand(x, usage, key)  # the blocks are inside the groups already
        if scaled is not None:
            return RowsSide(scaled, padding)
    return RowsSide(values_side(quantizer, quantizer.rows_operand(x, usage, dtype, rows, key), usage), padding)


def rows_sides(
    quantizer: AnyQuantizer,
    x: Tensor,
    rows: RowGroups,
    usages: tuple[Usage, ...],
    dtype: torch.dtype,
    align: int,
    key: Tensor | None = None,
) -> dict[Usage, RowsSide]:
    """Quantize x: [T, C] for the GEMMs of these usages, on an accelerator in one pass. key: see `Quantizer`."""
    made: tuple[Usage, ...] = ()
    if quantized_gemms(x.device):
        made = tuple(usage for usage in usages if copied(quantizer, usage, align))
    found = copies(quantizer, x, rows, made, align, key) if made else {}
    sides: dict[Usage, RowsSide] = {}
    for usage in usages:
        if usage not in found:
            sides[usage] = apart(quantizer, x, usage, dtype, rows, align, key)
            continue
        padding = padded(rows, _row_align(quantizer, usage, align))
        side = _side_of_copy(quantizer, found[usage], usage, dtype, x.shape, padding)
        sides[usage] = RowsSide(side, padding)
    return sides


def keep_rows(
    quantizer: AnyQuantizer,
    x: Tensor,
    rows: RowGroups,
    dtype: torch.dtype,
    align: int,
    override: BackwardOverride | None,
    save_original_input: bool,
    needs_wgrad: bool,
) -> tuple[RowsSide, Kept, tuple[Tensor, ...]]:
    """Quantize x: [T, C] for fprop and return (its side, how to read what is kept, what is kept), as `kept.keep` does
    for a dense layer. x may be `GroupedRows` of this quantizer's value: then they are kept as they are.
    """
    if isinstance(x, GroupedRows):
        kept = Kept("original") if needs_wgrad else Kept("nothing")
        return RowsSide(*fprop_side(x, rows, dtype)), kept, (x,) if needs_wgrad else ()
    usage: Usage = "rowwise" if override else "columnwise"  # of what is kept quantized
    original = (save_original_input and not override) or in_cpu_graph(x.device) or not copied(quantizer, usage, align)
    if not needs_wgrad or override == "high_precision" or original:
        left = rows_sides(quantizer, x, rows, ("rowwise",), dtype, align)["rowwise"]
        if not needs_wgrad:
            return left, Kept("nothing"), ()
        return left, Kept("plain" if override == "high_precision" else "original"), (x,)
    found = copies(quantizer, x, rows, ("rowwise",) if override else ("rowwise", "columnwise"), align)
    padding = padded(rows, _row_align(quantizer, "rowwise", align))
    left = RowsSide(_side_of_copy(quantizer, found["rowwise"], "rowwise", dtype, x.shape, padding), padding)
    prefix = "rowwise" if value_of(maker(quantizer, usage)).symmetric else usage
    fields = {name: field for name, field in found[usage].items() if name.startswith(prefix)}
    form = "dequantized" if override else "fields"
    return left, Kept(form, tuple(fields), tuple(x.shape)), tuple(fields.values())


def wgrad_rows(
    kept: Kept,
    quantizer: AnyQuantizer,
    tensors: list[Tensor],
    rows: RowGroups,
    dtype: torch.dtype,
    align: int,
    override: BackwardOverride | None,
) -> Side:
    """Return what `keep_rows` kept as the right side of wgrad, [C, P]."""
    padding = padded(rows, align)
    fields = dict(zip(kept.names, tensors, strict=True)) if kept.names else {}
    if kept.form == "fields":
        return _side_of_copy(quantizer, fields, "columnwise", dtype, kept.shape, padding)
    if kept.form == "dequantized":
        value = value_of(maker(quantizer, "rowwise"))
        x = dequantize_rows(value, fields, rows.m_splits, torch.Size(kept.shape), dtype)
    else:
        (x,) = tensors
        if isinstance(x, GroupedRows):
            return wgrad_side(x, padding, dtype)
        if kept.form == "original" and not override:
            return rows_sides(quantizer, x, rows, ("columnwise",), dtype, align)["columnwise"].side
        if kept.form == "original":
            x = _dequantized(quantizer, x, rows, dtype)
    return turned(Operand(x if padding is None else padding.pad(x), None), "columnwise")


def _dequantized(quantizer: AnyQuantizer, x: Tensor, rows: RowGroups, dtype: torch.dtype) -> Tensor:
    """Return what fprop's quantized x stands for, [T, C]."""
    padding = padded(rows, _row_align(quantizer, "rowwise", 1))
    inside = rows if padding is None else padding.groups()
    operand = quantizer.rows_operand(x if padding is None else padding.pad(x), "rowwise", dtype, inside)
    values = operand.values
    if operand.scale is not None:
        values = values.float() * inside.per_row(operand.scale)[:, None]
    return (values if padding is None else padding.unpad(values)).to(dtype)
