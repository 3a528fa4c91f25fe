"""Rows whose groups begin at multiples of a block: quantized as a dense layer's are, and on the way to their experts.

Where every group has a multiple of `row_align` rows, filled up with zeros, no block spans two groups as the rows lie:
they need no padded copy, and the kernels of dense layers serve. `permute_quantized` makes such rows and quantizes them
in the same pass, so that the permuted rows never reach memory in high precision. It is for formats with blocks of one
row, on accelerators, in layers without a bias: a bias would make rows that only fill up values of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.kernels.permute import Permutation, permute_quantized

from ..recipe.base import GemmQuantizers
from ..recipe.context import state as active
from ..tensor.storage import STORAGE_CLASSES, QuantizedStorage
from .gemm_operand import quantized_gemms


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
