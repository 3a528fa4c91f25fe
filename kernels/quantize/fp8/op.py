"""Public quantization functions: on CUDA a registered Triton kernel, elsewhere the reference, with the same bits.

On CPU under torch.compile Inductor sees the reference and fuses a quantization with its dequantization and with the
neighbouring element-wise operations, so an eight-bit copy is made only where it is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import launch
from ..hadamard import inverse_random_hadamard
from ..hashed import hash_key, hashed_bits
from ..nvfp4.op import (
    decode_blocks,
    dequantize_nvfp4,
    quantize_grouped_nvfp4,
    quantize_nvfp4,
    quantize_nvfp4_both,
    quantize_nvfp4_transposed,
    random_hadamard,
    transpose_nvfp4,
)
from ..nvfp4.reference import global_decode, round_nvfp4
from ..random import random_bits
from . import blocks, grouped, reference, registered
from .blocks import blockwise_amax
from .reference import FP8_MAX, e8m0_to_float, scale_from_amax
from .rounding import round_blockwise, round_per_tensor
from .statistics import quantization_statistics

__all__ = [
    "FP8_MAX",
    "amax",
    "blockwise_amax",
    "decode_blocks",
    "dequantize_blockwise",
    "dequantize_nvfp4",
    "dequantize_per_tensor",
    "e8m0_to_float",
    "global_decode",
    "grouped_amax",
    "hash_key",
    "hashed_bits",
    "inverse_random_hadamard",
    "quantization_statistics",
    "quantize_blockwise",
    "quantize_blockwise_both",
    "quantize_grouped_blockwise",
    "quantize_grouped_nvfp4",
    "quantize_grouped_per_tensor",
    "quantize_nvfp4",
    "quantize_nvfp4_both",
    "quantize_nvfp4_transposed",
    "quantize_per_tensor",
    "quantize_per_tensor_both",
    "random_bits",
    "random_hadamard",
    "round_blockwise",
    "round_nvfp4",
    "round_per_tensor",
    "scale_from_amax",
    "transpose_nvfp4",
]


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each matrix, float32: [..., R, C] -> [...]. NaN stays; an empty one has 0."""
    return registered.amax(x) if launch.on_accelerator(x) else blocks.amax(x)


def grouped_amax(x: Tensor, m_splits: Tensor) -> Tensor:
    """Return the largest magnitude in each group of rows of x: [T, C], m_splits [G] integer -> [G] float32."""
    return registered.grouped_amax(x, m_splits) if launch.on_accelerator(x) else grouped.grouped_amax(x, m_splits)


def quantize_per_tensor(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return clamp(x * scale) as FP8. scale: float32, broadcastable to x. A NaN stays, infinities saturate."""
    if launch.on_accelerator(x):
        return registered.quantize_per_tensor(x, scale, fp8_dtype)
    return reference.quantize_per_tensor(x, scale, fp8_dtype)


def quantize_per_tensor_both(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `quantize_per_tensor` twice: as it lies, and the same tensor lying transposed in memory on CUDA, where FP8
    GEMMs need that (elsewhere: the same tensor)."""
    if launch.on_accelerator(x):
        return registered.quantize_per_tensor_both(x, scale, fp8_dtype)
    data = reference.quantize_per_tensor(x, scale, fp8_dtype)
    return data, data


def quantize_grouped_per_tensor(
    x: Tensor, m_splits: Tensor, scale: Tensor, fp8_dtype: torch.dtype, *, align: int = 16, columnwise: bool = True
) -> list[Tensor]:
    """Quantize each group of rows of x [T, C] with its own scale [G], m_splits [G] integer.

    Returns the rowwise copy [T, C], zero past the last group, and if asked for the columnwise one [P, C], in which
    every group begins at a multiple of `align` rows and is followed by zeros up to the next one (see `grouped`).
    """
    if launch.on_accelerator(x):
        return registered.quantize_grouped_per_tensor(x, m_splits, scale, fp8_dtype, align, columnwise)
    return grouped.quantize_grouped_per_tensor(x, m_splits, scale, fp8_dtype, align=align, columnwise=columnwise)


def quantize_blockwise(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, *, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Quantize blocks of x: [..., R, C].

    Returns data (fp8_dtype, x's shape) and the scales to multiply with when dequantizing, [..., ceil(R/br),
    ceil(C/bc)]: float32, or uint8 bytes for "e8m0". Infinities saturate; a NaN stays in its element ("e8m0": makes its
    block NaN). scale_kind: "float32", "pow2" or "e8m0".
    """
    if launch.on_accelerator(x):
        return registered.quantize_blockwise(x, list(block), fp8_dtype, scale_kind, epsilon)
    return reference.quantize_blockwise(x, block, fp8_dtype, scale_kind, epsilon=epsilon)


def quantize_blockwise_both(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, *, epsilon: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize x: [..., R, C] by `block` and by the transposed block: (row_data, row_scale, col_data, col_scale).

    All four are in x's orientation, each pair as `quantize_blockwise` returns it; on CUDA in one pass over x.
    """
    if launch.on_accelerator(x):
        return registered.quantize_blockwise_both(x, list(block), fp8_dtype, scale_kind, epsilon)
    return reference.quantize_blockwise_both(x, block, fp8_dtype, scale_kind, epsilon=epsilon)


def quantize_grouped_blockwise(
    x: Tensor,
    m_splits: Tensor,
    block: tuple[int, int],
    fp8_dtype: torch.dtype,
    scale_kind: str,
    *,
    epsilon: float = 0.0,
    rowwise: bool = True,
    columnwise: bool = True,
) -> list[Tensor]:
    """Quantize each group of rows of x [T, C] by `block` (rowwise) and by the transposed block (columnwise).

    Returns data and scales of each copy asked for, in this order. A copy whose blocks span several rows has padded
    rows, [P, C]: every group begins at a multiple of the block's rows (see `grouped`).
    """
    if launch.on_accelerator(x):
        return registered.quantize_grouped_blockwise(
            x, m_splits, list(block), fp8_dtype, scale_kind, epsilon, rowwise, columnwise
        )
    return grouped.quantize_grouped_blockwise(
        x, m_splits, block, fp8_dtype, scale_kind, epsilon=epsilon, rowwise=rowwise, columnwise=columnwise
    )


def dequantize_blockwise(data: Tensor, stored: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return data * scale in `dtype`. data: [..., R, C] FP8; stored: its scales, float32 or uint8 exponents."""
    if launch.on_accelerator(data):
        return registered.dequantize_blockwise(data, stored, list(block), dtype)
    return reference.dequantize_blockwise(data, stored, block, dtype)


def dequantize_per_tensor(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Return data * scale_inv in `dtype`. scale_inv: float32, broadcastable to data."""
    if launch.on_accelerator(data):
        return registered.dequantize_per_tensor(data, scale_inv, dtype)
    return reference.dequantize_per_tensor(data, scale_inv, dtype)
