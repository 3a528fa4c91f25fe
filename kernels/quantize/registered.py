"""The Triton kernels as registered ops, opaque to the compiler, each with a fake; `op` calls them on an accelerator.

Their arguments and results are those of the references. Columnwise FP8 data that GEMMs read transposed comes back in
the input's orientation, lying transposed in memory (see `layout`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import layout
from .grouped import padded_length


def _check(block: list[int]) -> None:
    if any(size not in (1, 2, 4, 8, 16, 32, 64, 128) for size in block):
        raise ValueError(f"block is {tuple(block)}; allowed on an accelerator: powers of two up to 128")


@torch.library.custom_op("te_models::amax", mutates_args=())
def amax(x: Tensor) -> Tensor:
    """See `blocks.amax`."""
    from . import triton_tensor

    return triton_tensor.amax(x)


@amax.register_fake
def _(x):
    return x.new_empty(x.shape[:-2], dtype=torch.float32)


@torch.library.custom_op("te_models::grouped_amax", mutates_args=())
def grouped_amax(x: Tensor, m_splits: Tensor) -> Tensor:
    """See `grouped.grouped_amax`."""
    from . import triton_tensor

    return triton_tensor.amax(x, m_splits)


@grouped_amax.register_fake
def _(x, m_splits):
    return x.new_empty(m_splits.shape, dtype=torch.float32)


@torch.library.custom_op("te_models::quantize_per_tensor", mutates_args=())
def quantize_per_tensor(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """See `reference.quantize_per_tensor`."""
    from . import triton_tensor

    return triton_tensor.quantize_per_tensor(x, scale, fp8_dtype)[0]


@quantize_per_tensor.register_fake
def _(x, scale, fp8_dtype):
    return x.new_empty(x.shape, dtype=fp8_dtype)


@torch.library.custom_op("te_models::quantize_per_tensor_both", mutates_args=())
def quantize_per_tensor_both(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_per_tensor`; the second copy lies transposed in memory."""
    from . import triton_tensor

    row, col = triton_tensor.quantize_per_tensor(x, scale, fp8_dtype, columnwise=True)
    return row, col


@quantize_per_tensor_both.register_fake
def _(x, scale, fp8_dtype):
    return x.new_empty(x.shape, dtype=fp8_dtype), layout.empty_transposed(x, fp8_dtype)


@torch.library.custom_op("te_models::quantize_grouped_per_tensor", mutates_args=())
def quantize_grouped_per_tensor(
    x: Tensor, m_splits: Tensor, scale: Tensor, fp8_dtype: torch.dtype, align: int
) -> tuple[Tensor, Tensor]:
    """See `grouped.quantize_grouped_per_tensor`."""
    from . import triton_tensor

    flags = {"columnwise": True, "m_splits": m_splits, "align": align}
    row, col = triton_tensor.quantize_per_tensor(x, scale, fp8_dtype, **flags)
    return row, col


@quantize_grouped_per_tensor.register_fake
def _(x, m_splits, scale, fp8_dtype, align):
    padded = padded_length(x.shape[0], m_splits.shape[0], align)
    return x.new_empty(x.shape, dtype=fp8_dtype), layout.empty_transposed(x, fp8_dtype, padded)


@torch.library.custom_op("te_models::dequantize_per_tensor", mutates_args=())
def dequantize_per_tensor(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference.dequantize_per_tensor`."""
    from . import triton_tensor

    return triton_tensor.dequantize(data, scale_inv, None, dtype)


@dequantize_per_tensor.register_fake
def _(data, scale_inv, dtype):
    return data.new_empty(data.shape, dtype=dtype)


@torch.library.custom_op("te_models::quantize_blockwise", mutates_args=())
def quantize_blockwise(
    x: Tensor, block: list[int], fp8_dtype: torch.dtype, scale_kind: str, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_blockwise`."""
    from . import triton_blockwise

    _check(block)
    upright = block[0] > block[1]
    wide = (min(block), max(block))
    data, scales = triton_blockwise.quantize_blockwise(
        x, wide, fp8_dtype, scale_kind, epsilon, rowwise=not upright, columnwise=upright
    )
    return data, scales


@quantize_blockwise.register_fake
def _(x, block, fp8_dtype, scale_kind, epsilon):
    data, scales = layout.empty_copy(x, (block[0], block[1]), fp8_dtype, scale_kind)
    return data, scales


@torch.library.custom_op("te_models::quantize_blockwise_both", mutates_args=())
def quantize_blockwise_both(
    x: Tensor, block: list[int], fp8_dtype: torch.dtype, scale_kind: str, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.quantize_blockwise_both`. block: not more rows than columns."""
    from . import triton_blockwise

    _check(block)
    wide = (block[0], block[1])
    row, row_scale, col, col_scale = triton_blockwise.quantize_blockwise(
        x, wide, fp8_dtype, scale_kind, epsilon, columnwise=True
    )
    return row, row_scale, col, col_scale


@quantize_blockwise_both.register_fake
def _(x, block, fp8_dtype, scale_kind, epsilon):
    row, row_scale = layout.empty_copy(x, (block[0], block[1]), fp8_dtype, scale_kind)
    col, col_scale = layout.empty_copy(x, (block[1], block[0]), fp8_dtype, scale_kind)
    return row, row_scale, col, col_scale


@torch.library.custom_op("te_models::quantize_grouped_blockwise", mutates_args=())
def quantize_grouped_blockwise(
    x: Tensor,
    m_splits: Tensor,
    block: list[int],
    fp8_dtype: torch.dtype,
    scale_kind: str,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
) -> list[Tensor]:
    """See `grouped.quantize_grouped_blockwise`. block: not more rows than columns."""
    from . import triton_blockwise

    _check(block)
    flags = {"rowwise": rowwise, "columnwise": columnwise, "m_splits": m_splits}
    return triton_blockwise.quantize_blockwise(x, (block[0], block[1]), fp8_dtype, scale_kind, epsilon, **flags)


@quantize_grouped_blockwise.register_fake
def _(x, m_splits, block, fp8_dtype, scale_kind, epsilon, rowwise, columnwise):
    groups = m_splits.shape[0]
    row = layout.empty_copy(x, (block[0], block[1]), fp8_dtype, scale_kind, groups) if rowwise else []
    col = layout.empty_copy(x, (block[1], block[0]), fp8_dtype, scale_kind, groups) if columnwise else []
    return row + col


@torch.library.custom_op("te_models::dequantize_blockwise", mutates_args=())
def dequantize_blockwise(data: Tensor, stored: Tensor, block: list[int], dtype: torch.dtype) -> Tensor:
    """See `reference.dequantize_blockwise`."""
    from . import triton_tensor

    _check(block)
    return triton_tensor.dequantize(data, stored, (block[0], block[1]), dtype)


@dequantize_blockwise.register_fake
def _(data, stored, block, dtype):
    return data.new_empty(data.shape, dtype=dtype)
