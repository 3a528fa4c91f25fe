"""Rows of groups that come quantized, and tokens that are quantized as they are permuted into such rows."""

import torch
from torch import Tensor

from te_models.kernels.asserted import host_reads
from te_models.kernels.permute import Permutation, permute_quantized

from ..recipe.base import GemmQuantizers
from ..recipe.context import state as active
from ..tensor.grouped_tensor import GroupedRows
from ..tensor.storage import QuantizedStorage, storage_of
from .product import quantized_gemms


def rows_or_values(
    x: Tensor, m_splits: Tensor, quantizers: GemmQuantizers | None, dtype: torch.dtype, align: int
) -> Tensor:
    """Return x as a grouped layer may use it: rows that the recipe's input quantizer made as they are, other quantized
    rows (and all rows under a recipe that looks at the values) dequantized to `dtype`, plain rows in `dtype`.

    align: of the rows that wgrad contracts, see `row_alignment`. ValueError for rows of other splits, where that can be
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


def row_align_of(quantizers: GemmQuantizers | None, device: torch.device) -> int:
    """Return the multiple of rows that groups are to have for these functions; 1: they do not serve."""
    if quantizers is None or quantizers.backward_override or not quantized_gemms(device) or active().statistics:
        return 1
    align = 1
    for quantizer in (quantizers.input, quantizers.grad_output):
        # other formats have a scale for each group, and a dense layer's kernels do not know groups
        if not quantizer.BLOCK_SCALES_ONLY or quantizer.symmetric:
            return 1
        if not (quantizer.rowwise and quantizer.columnwise):
            return 1
        align = max(align, quantizer.row_block("columnwise"))
    return align


def is_aligned(quantizers: GemmQuantizers, device: torch.device, row_align: int) -> bool:
    """Whether rows whose groups have multiples of `row_align` need no padding in any GEMM."""
    wanted = row_align_of(quantizers, device)
    return wanted > 1 and row_align % wanted == 0


def permuted(x: Tensor, permutation: Permutation, quantizers: GemmQuantizers, dtype: torch.dtype) -> QuantizedStorage:
    """Return the rows [R, K] that tokens x [T, K] are copied to, quantized. permutation: made with `row_align_of`."""
    quantizer = quantizers.input
    output = quantizer.output()
    assert output is not None, "the caller has asked"
    fields = quantizer.fields_of_output(permute_quantized(x.to(dtype), permutation, output))
    shape = torch.Size((permutation.slot_of_row.shape[0], x.shape[1]))
    return storage_of(fields, quantizer, shape, dtype)
