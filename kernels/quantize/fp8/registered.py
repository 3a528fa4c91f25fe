"""The Triton kernels as registered operations, opaque to the compiler; `op` calls them on an accelerator.

Their arguments and results are those of the references. Columnwise FP8 data that GEMMs read transposed comes back in
the input's orientation, lying transposed in memory (see `layout`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...custom_op import Output, like, operation
from .. import layout
from .grouped import padded_length


def _check(block: tuple[int, int]) -> None:
    if any(size not in (1, 2, 4, 8, 16, 32, 64, 128) for size in block):
        raise ValueError(f"block is {block}; allowed on an accelerator: powers of two up to 128")


@operation("amax", lambda x: like(x, x.shape[:-2], torch.float32))
def amax(x: Tensor) -> Tensor:
    """See `blocks.amax`."""
    from . import triton_tensor

    return triton_tensor.amax(x)


@operation("grouped_amax", lambda x, m_splits: like(x, m_splits.shape, torch.float32))
def grouped_amax(x: Tensor, m_splits: Tensor) -> Tensor:
    """See `grouped.grouped_amax`."""
    from . import triton_tensor

    return triton_tensor.amax(x, m_splits)


@operation("quantize_per_tensor", lambda x, fp8_dtype: like(x, dtype=fp8_dtype))
def quantize_per_tensor(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """See `reference.quantize_per_tensor`."""
    from . import triton_tensor

    return triton_tensor.quantize_per_tensor(x, scale, fp8_dtype)[0]


def _both_copies(x: Tensor, fp8_dtype: torch.dtype) -> tuple[Output, Output]:
    return like(x, dtype=fp8_dtype), layout.transposed_copy(x, fp8_dtype)


@operation("quantize_per_tensor_both", _both_copies)
def quantize_per_tensor_both(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_per_tensor`; the second copy lies transposed in memory."""
    from . import triton_tensor

    row, col = triton_tensor.quantize_per_tensor(x, scale, fp8_dtype, columnwise=True)
    return row, col


def _grouped_copies(x: Tensor, m_splits: Tensor, fp8_dtype: torch.dtype, align: int, columnwise: bool) -> list[Output]:
    padded = padded_length(x.shape[0], m_splits.shape[0], align)
    row = like(x, dtype=fp8_dtype)
    return [row, layout.transposed_copy(x, fp8_dtype, padded)] if columnwise else [row]


@operation("quantize_grouped_per_tensor", _grouped_copies)
def quantize_grouped_per_tensor(
    x: Tensor, m_splits: Tensor, scale: Tensor, fp8_dtype: torch.dtype, align: int, columnwise: bool
) -> list[Tensor]:
    """See `grouped.quantize_grouped_per_tensor`."""
    from . import triton_tensor

    flags = {"columnwise": columnwise, "m_splits": m_splits, "align": align}
    return triton_tensor.quantize_per_tensor(x, scale, fp8_dtype, **flags)


@operation("dequantize_per_tensor", lambda data, dtype: like(data, dtype=dtype))
def dequantize_per_tensor(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference.dequantize_per_tensor`."""
    from . import triton_tensor

    return triton_tensor.dequantize(data, scale_inv, None, dtype)


def _copy_by_blocks(x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str) -> tuple[Output, ...]:
    return tuple(layout.copy_by_blocks(x, block, fp8_dtype, scale_kind))


@operation("quantize_blockwise", _copy_by_blocks)
def quantize_blockwise(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, epsilon: float
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


def _both_by_blocks(x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str) -> tuple[Output, ...]:
    sides = (block, (block[1], block[0]))
    return tuple(output for side in sides for output in layout.copy_by_blocks(x, side, fp8_dtype, scale_kind))


@operation("quantize_blockwise_both", _both_by_blocks)
def quantize_blockwise_both(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.quantize_blockwise_both`. block: not more rows than columns."""
    from . import triton_blockwise

    _check(block)
    row, row_scale, col, col_scale = triton_blockwise.quantize_blockwise(
        x, block, fp8_dtype, scale_kind, epsilon, columnwise=True
    )
    return row, row_scale, col, col_scale


def _grouped_by_blocks(
    x: Tensor,
    m_splits: Tensor,
    block: tuple[int, int],
    fp8_dtype: torch.dtype,
    scale_kind: str,
    rowwise: bool,
    columnwise: bool,
) -> list[Output]:
    sides = [(block, rowwise), ((block[1], block[0]), columnwise)]
    groups = m_splits.shape[0]
    wanted = [layout.copy_by_blocks(x, side, fp8_dtype, scale_kind, groups) for side, made in sides if made]
    return [output for copies in wanted for output in copies]


@operation("quantize_grouped_blockwise", _grouped_by_blocks)
def quantize_grouped_blockwise(
    x: Tensor,
    m_splits: Tensor,
    block: tuple[int, int],
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
    return triton_blockwise.quantize_blockwise(x, block, fp8_dtype, scale_kind, epsilon, **flags)


@operation("dequantize_blockwise", lambda data, dtype: like(data, dtype=dtype))
def dequantize_blockwise(data: Tensor, stored: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """See `reference.dequantize_blockwise`."""
    from . import triton_tensor

    _check(block)
    return triton_tensor.dequantize(data, stored, block, dtype)
