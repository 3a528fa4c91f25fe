"""Rows of groups that come quantized into a grouped layer: its GEMMs read their fields, nothing is quantized again."""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling

from ..quantizer import Quantizer, Usage
from ..quantizer.delayed import DelayedScalingQuantizer
from ..quantizer.group_offsets import PaddedRows, RowGroups
from ..recipe.base import GemmQuantizers
from ..recipe.context import state
from ..tensor.grouped_rows import row_alignment
from ..tensor.grouped_tensor import GroupedRows
from .gemm_operand import Side, side_of_fields


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
    readable = m_splits.device.type == "cpu" and not compiling()
    if m_splits.shape != x.m_splits.shape or (readable and not torch.equal(m_splits.to(x.m_splits.dtype), x.m_splits)):
        raise ValueError("m_splits are not those that the rows were quantized under; pass x.m_splits")
    plain = quantizers is None or quantizers.backward_override is not None or state().calibrating or state().statistics
    if plain or quantizers is None or isinstance(quantizers.input, DelayedScalingQuantizer) or x.dtype != dtype:
        return x.dequantize(dtype)
    fits = row_alignment(x.quantizer, "columnwise") in (1, align)
    return x if fits and same_numbers(x.quantizer, quantizers.input) else x.dequantize(dtype)


def same_numbers(one: Quantizer, other: Quantizer) -> bool:
    """Whether two quantizers differ in the copies that they make only. In a graph, which cannot make new quantizers to
    compare, those that differ in that have to pass for different."""
    if one == other or compiling():
        return one == other
    both = {"rowwise": True, "columnwise": True}
    return one.with_usage(**both) == other.with_usage(**both)


def _side(x: GroupedRows, usage: Usage, dtype: torch.dtype, rows: int) -> Side:
    return side_of_fields(x.quantizer, x.fields, usage, dtype, (rows, x.shape[1]))


def fprop_side(x: GroupedRows, rows: RowGroups, dtype: torch.dtype) -> tuple[Side, PaddedRows | None]:
    """Return x as the left side of fprop, and the padding of its rows where its blocks span some."""
    align = row_alignment(x.quantizer, "rowwise")
    padding = None if align == 1 else rows.padded(align)
    return _side(x, "rowwise", dtype, x.shape[0] if padding is None else padding.used.shape[0]), padding


def wgrad_side(x: GroupedRows, padding: PaddedRows | None, dtype: torch.dtype) -> Side:
    """Return x as the right side of wgrad, [K, P], in the padded rows that wgrad contracts."""
    if padding is None:
        return _side(x, "columnwise", dtype, x.shape[0])
    if row_alignment(x.quantizer, "columnwise") == 1:  # in the rows that came in: one copy, or a hybrid's own
        name = "rowwise_data" if x.quantizer.symmetric else "columnwise_data"
        data = x.fields[name]
        # FP8 cannot be indexed everywhere; its bytes can
        words = data.view(torch.uint8) if data.dtype.itemsize == 1 else data
        padded = padding.pad(words).view(data.dtype)
        fields = x.fields | {name: padded}
        return side_of_fields(x.quantizer, fields, "columnwise", dtype, (padded.shape[0], x.shape[1]))
    return _side(x, "columnwise", dtype, padding.used.shape[0])
