"""Rows of groups that come quantized into a grouped layer: its GEMMs read their fields, nothing is quantized again."""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling

from ..quantizer import Usage
from ..quantizer.group_offsets import GroupOffsets, PaddedRows
from ..recipe.base import GemmQuantizers
from ..recipe.context import state as active
from ..tensor.grouped_tensor import GroupedRows
from .gemm_operand import GemmOperand, stored_operand


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
