"""Rows sorted by group as operands of grouped GEMMs, and what fprop saves of its input for wgrad.

Where GEMMs take quantized numbers, rows are quantized once for all the GEMMs that take them: one kernel makes both
copies from the splits on the device, the padding that wgrad's copy needs included. Eagerly on a CPU the input is, too,
so that its quantized copy is saved and not itself. In a CPU graph, and for gradients on a CPU, every operand is made
from a padded copy of the rows (`_quantized_apart`). Rows that come quantized already (`GroupedRows`) are read as they
are.

Aligned rows need no padded copy: where every group has a multiple of `row_align` rows, filled up with zeros, no block
spans two groups as the rows lie, and the kernels of dense layers serve. `permute_quantized` makes such rows and
quantizes them in the same pass, so that the permuted rows never reach memory in high precision. It is for formats with
blocks of one row, on accelerators, in layers without a bias: a bias would make rows that only fill up values of their
own.

T rows, P padded rows, C columns, G groups. align: of the rows that wgrad contracts, see `grouped_gemms.row_alignment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_models.kernels.asserted import host_reads
from te_models.kernels.backend import Backend
from te_models.kernels.gemm import Operand
from te_models.kernels.permute import Permutation, permute_quantized
from te_models.kernels.quantize import cpu_fields

from ..quantizer import Fields, Usage
from ..quantizer.group_offsets import GroupOffsets, PaddedRows
from ..quantizer.state import AnyQuantizer, value_of
from ..recipe.base import BackwardOverride, GemmQuantizers
from ..recipe.context import state as active
from ..tensor.grouped_tensor import GroupedRows
from ..tensor.storage import STORAGE_CLASSES, QuantizedStorage
from .gemm_operand import GemmOperand, emulating, in_cpu_graph, quantized_gemms, stored_operand, transposed
from .saved_input import NOTHING_SAVED, SavedInput, fields_of_usage


class RowsOperand(NamedTuple):
    """Rows as one operand of a grouped GEMM. padding: where they lie; None: in the T rows that came in."""

    operand: GemmOperand
    padding: PaddedRows | None


def _padding(quantizer: AnyQuantizer, offsets: GroupOffsets, usage: Usage, align: int) -> PaddedRows | None:
    """Return where the rows of an operand lie, groups beginning at multiples of its alignment; None: as they came."""
    align = align if usage == "columnwise" else quantizer.row_block("rowwise")
    return None if align == 1 else offsets.padded(align)


def _operand_of_copy(
    quantizer: AnyQuantizer,
    fields: Fields,
    usage: Usage,
    dtype: torch.dtype,
    shape: Sequence[int],
    padding: PaddedRows | None,
) -> RowsOperand:
    """Return a copy of rows as an operand. shape: [T, C], the rows' shape before `padding`."""
    rows = shape[0] if padding is None else padding.used.shape[0]
    value = value_of(quantizer.member(usage))
    return RowsOperand(stored_operand(value, fields, usage, dtype, (rows, shape[1])), padding)


def _quantized_apart(
    quantizer: AnyQuantizer,
    x: Tensor,
    usage: Usage,
    dtype: torch.dtype,
    offsets: GroupOffsets,
    align: int,
    key: Tensor | None = None,
) -> RowsOperand:
    """Quantize x: [T, C] for one GEMM, from a padded copy where it wants one."""
    padding = _padding(quantizer, offsets, usage, align)
    if padding is not None:
        x, offsets = padding.pad(x), padding.groups()
    if not quantized_gemms(x.device):
        return RowsOperand(transposed(quantizer.rows_operand(x, usage, dtype, offsets, key), usage), padding)
    member = quantizer.member(usage)
    if member.BLOCK_SCALES_ONLY:
        scaled = member.scaled_operand(x, usage, key)  # the blocks are inside the groups already
        if scaled is not None:
            return RowsOperand(scaled, padding)
    return RowsOperand(emulating(quantizer, quantizer.rows_operand(x, usage, dtype, offsets, key), usage), padding)


def rows_operands(
    quantizer: AnyQuantizer,
    x: Tensor,
    offsets: GroupOffsets,
    usages: tuple[Usage, ...],
    dtype: torch.dtype,
    align: int,
    key: Tensor | None = None,
) -> dict[Usage, RowsOperand]:
    """Quantize x: [T, C] for the GEMMs of these usages, on an accelerator in one pass. key: see `Quantizer`."""
    together: list[Usage] = []
    if quantized_gemms(x.device):
        together = [usage for usage in usages if quantizer.quantizes_rows(usage, align)]
    fields: dict[Usage, Fields] = {}
    if together:
        fields = quantizer.quantize_rows_for_gemms(x, offsets.m_splits, together, align, key)
    operands: dict[Usage, RowsOperand] = {}
    for usage in usages:
        if usage not in fields:
            operands[usage] = _quantized_apart(quantizer, x, usage, dtype, offsets, align, key)
        else:
            padding = _padding(quantizer, offsets, usage, align)
            operands[usage] = _operand_of_copy(quantizer, fields[usage], usage, dtype, x.shape, padding)
    return operands


def quantize_and_save_rows(
    quantizer: AnyQuantizer,
    x: Tensor,
    offsets: GroupOffsets,
    dtype: torch.dtype,
    align: int,
    override: BackwardOverride | None,
    save_original_input: bool,
    needs_wgrad: bool,
) -> tuple[RowsOperand, SavedInput, tuple[Tensor, ...]]:
    """Quantize x: [T, C] for fprop and return (its operand, how to read what is saved, what is saved), as
    `quantize_and_save` does for a dense layer. x may be `GroupedRows` of this quantizer's value: then they are saved as
    they are.
    """
    if isinstance(x, GroupedRows):
        saved = SavedInput("original") if needs_wgrad else NOTHING_SAVED
        return RowsOperand(*fprop_operand(x, offsets, dtype)), saved, (x,) if needs_wgrad else ()
    usage: Usage = "rowwise" if override else "columnwise"  # of what is saved quantized
    original = (save_original_input and not override) or in_cpu_graph(x.device)
    if not needs_wgrad or override == "high_precision" or original or not quantizer.quantizes_rows(usage, align):
        left = rows_operands(quantizer, x, offsets, ("rowwise",), dtype, align)["rowwise"]
        if not needs_wgrad:
            return left, NOTHING_SAVED, ()
        if not override and not save_original_input:
            fields = _fields_in_graph(quantizer, x, offsets, align)
            if fields is not None:
                return left, SavedInput("fields", tuple(fields), tuple(x.shape)), tuple(fields.values())
        return left, SavedInput("plain" if override == "high_precision" else "original"), (x,)
    usages: tuple[Usage, ...] = ("rowwise",) if override else ("rowwise", "columnwise")
    if usage == "columnwise" and not quantizer.symmetric and cpu_fields.chosen(x) is Backend.COMPILED:
        # C++ rounds rows in one pass, which takes less than decoding a stored copy of them
        left = _quantized_apart(quantizer, x, "rowwise", dtype, offsets, align)
        by_usage = quantizer.quantize_rows_for_gemms(x, offsets.m_splits, ("columnwise",), align)
    else:
        by_usage = quantizer.quantize_rows_for_gemms(x, offsets.m_splits, usages, align)
        padding = _padding(quantizer, offsets, "rowwise", align)
        left = _operand_of_copy(quantizer, by_usage["rowwise"], "rowwise", dtype, x.shape, padding)
    fields = fields_of_usage(by_usage[usage], "rowwise" if quantizer.member(usage).symmetric else usage)
    form = "dequantized" if override else "fields"
    return left, SavedInput(form, tuple(fields), tuple(x.shape)), tuple(fields.values())


def _fields_in_graph(quantizer: AnyQuantizer, x: Tensor, offsets: GroupOffsets, align: int) -> Fields | None:
    """Return the columnwise fields of rows in a graph that a CPU runs; None where there are none, or where they might
    take as much memory as x, for being padded."""
    value = value_of(quantizer)
    if value.symmetric or not (value.BLOCK_SCALES_ONLY and value.quantizes_rows("columnwise", align)):
        return None
    if not (in_cpu_graph(x.device) and statically_known_true(offsets.num_groups * align <= x.shape[0])):
        return None
    return value.fields_in_graph(offsets.padded(align).pad(x), "columnwise")


def saved_rows_operand(
    saved: SavedInput,
    quantizer: AnyQuantizer,
    tensors: list[Tensor],
    offsets: GroupOffsets,
    dtype: torch.dtype,
    align: int,
    override: BackwardOverride | None,
) -> GemmOperand:
    """Return what `quantize_and_save_rows` saved as the right operand of wgrad, [C, P]."""
    padding = None if align == 1 else offsets.padded(align)
    fields = dict(zip(saved.names, tensors, strict=True)) if saved.names else {}
    if saved.form == "fields":
        return _operand_of_copy(quantizer, fields, "columnwise", dtype, saved.shape, padding).operand
    if saved.form == "dequantized":
        value = value_of(quantizer.member("rowwise"))
        x = value.dequantize_rows(fields, offsets.m_splits, torch.Size(saved.shape), dtype)
    else:
        (x,) = tensors
        if isinstance(x, GroupedRows):
            return wgrad_operand(x, padding, dtype)
        if saved.form == "original" and not override:
            return rows_operands(quantizer, x, offsets, ("columnwise",), dtype, align)["columnwise"].operand
        if saved.form == "original":
            x = _dequantized(quantizer, x, offsets, dtype)
    return transposed(Operand(x if padding is None else padding.pad(x), None), "columnwise")


def _dequantized(quantizer: AnyQuantizer, x: Tensor, offsets: GroupOffsets, dtype: torch.dtype) -> Tensor:
    """Return what fprop's quantized x stands for, [T, C]."""
    padding = _padding(quantizer, offsets, "rowwise", 1)
    inside = offsets if padding is None else padding.groups()
    operand = quantizer.rows_operand(x if padding is None else padding.pad(x), "rowwise", dtype, inside)
    values = operand.values
    if operand.scale is not None:
        values = values.float() * inside.per_row(operand.scale)[:, None]
    return (values if padding is None else padding.unpad(values)).to(dtype)


def rows_or_values(
    x: Tensor, m_splits: Tensor, quantizers: GemmQuantizers | None, dtype: torch.dtype, align: int
) -> Tensor:
    """Return x as a grouped layer may use it: rows that the recipe's input quantizer made as they are, others (and
    those of a recipe that looks at the values) dequantized to `dtype`, plain rows in `dtype`.

    align: of the rows that wgrad contracts, see `grouped_gemms`. ValueError for rows of other splits, where that can be
    seen without waiting for a device.
    """
    if not isinstance(x, GroupedRows):
        return x.to(dtype)
    x.require_matrix("be the input of a grouped layer")
    if m_splits.shape != x.m_splits.shape or (
        host_reads(m_splits) and not torch.equal(m_splits.to(x.m_splits.dtype), x.m_splits)
    ):
        raise ValueError("m_splits are not those that the rows were quantized under; pass x.m_splits")
    if quantizers is None or quantizers.backward_override is not None or active().calibrating or active().statistics:
        return x.dequantize(dtype)
    wanted = quantizers.input
    fits = not wanted.NEEDS_STATE and x.dtype == dtype and x.quantizer.row_block("columnwise") in (1, align)
    return x if fits and wanted.same_numbers(x.quantizer) else x.dequantize(dtype)


def _operand(x: GroupedRows, usage: Usage, dtype: torch.dtype, rows: int) -> GemmOperand:
    return stored_operand(x.quantizer, x.fields, usage, dtype, (rows, x.shape[1]))


def fprop_operand(x: GroupedRows, offsets: GroupOffsets, dtype: torch.dtype) -> tuple[GemmOperand, PaddedRows | None]:
    """Return x as the left operand of fprop, and the padding of its rows where its blocks span some."""
    align = x.quantizer.row_block("rowwise")
    padding = None if align == 1 else offsets.padded(align)
    return _operand(x, "rowwise", dtype, x.shape[0] if padding is None else padding.used.shape[0]), padding


def wgrad_operand(x: GroupedRows, padding: PaddedRows | None, dtype: torch.dtype) -> GemmOperand:
    """Return x as the right operand of wgrad, [K, P], in the padded rows that wgrad contracts."""
    if padding is None:
        return _operand(x, "columnwise", dtype, x.shape[0])
    if x.quantizer.row_block("columnwise") == 1:  # in the rows that came in: one copy, or a hybrid's own
        name = "rowwise_data" if x.quantizer.symmetric else "columnwise_data"
        data = x.fields[name]
        # FP8 cannot be indexed everywhere; its bytes can
        words = data.view(torch.uint8) if data.dtype.itemsize == 1 else data
        padded = padding.pad(words).view(data.dtype)
        fields = x.fields | {name: padded}
        return stored_operand(x.quantizer, fields, "columnwise", dtype, (padded.shape[0], x.shape[1]))
    return _operand(x, "columnwise", dtype, padding.used.shape[0])


def row_align_of(quantizers: GemmQuantizers | None, device: torch.device) -> int:
    """Return the multiple of rows that groups are to have for these functions; 1: they do not serve."""
    if quantizers is None or quantizers.backward_override or not quantized_gemms(device) or active().statistics:
        return 1
    align = 1
    for quantizer in (quantizers.input, quantizers.grad_output):
        # other formats have a scale for each group, which a dense layer's kernels do not know
        if not quantizer.BLOCK_SCALES_ONLY or quantizer.symmetric:
            return 1
        if not (quantizer.rowwise and quantizer.columnwise):
            return 1
        align = max(align, quantizer.row_block("columnwise"))
    return align


def is_aligned(quantizers: GemmQuantizers, device: torch.device, row_align: int) -> bool:
    """Whether rows whose groups have multiples of `row_align` need no padding in any GEMM."""
    if row_align == 1:
        return False
    wanted = row_align_of(quantizers, device)
    return wanted > 1 and row_align % wanted == 0


def permuted(x: Tensor, permutation: Permutation, quantizers: GemmQuantizers, dtype: torch.dtype) -> QuantizedStorage:
    """Return the rows [R, K] that tokens x [T, K] are copied to, quantized. permutation: made with `row_align_of`."""
    quantizer = quantizers.input
    output = quantizer.output()
    assert output is not None, "the caller has asked"
    fields = quantizer.fields_of_output(permute_quantized(x.to(dtype), permutation, output))
    shape = torch.Size((permutation.slot_of_row.shape[0], x.shape[1]))
    return STORAGE_CLASSES[quantizer.FORMAT](fields, quantizer, shape, dtype)
