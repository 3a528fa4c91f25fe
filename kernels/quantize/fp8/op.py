"""Quantization to FP8 and back: on an accelerator registered Triton kernels, elsewhere the references, the same bits.

On CPU under torch.compile Inductor sees the reference and fuses a quantization with its dequantization and with the
neighbouring element-wise operations, so an eight-bit copy is made only where it is kept. On an accelerator, columnwise
FP8 data that GEMMs read transposed comes back in the input's orientation, lying transposed in memory.
"""

import torch
from torch import Tensor

from ...custom_op import FLOATS, INTEGERS, Output, expands, like, operation, takes
from ..output import copy_by_blocks, transposed_copy
from . import blocks, grouped, reference
from .grouped import padded_length


def _check(block: tuple[int, int]) -> None:
    if any(size not in (1, 2, 4, 8, 16, 32, 64, 128) for size in block):
        raise ValueError(f"block is {block}; allowed on an accelerator: powers of two up to 128")


_FP8 = "float8_e4m3fn|float8_e5m2"
_MATRICES = takes(f"x: {FLOATS} [..., R, C]")
_GROUPS = takes(f"x: {FLOATS} [R, C]; m_splits: {INTEGERS} [G]")
_SCALED = takes(f"x: {FLOATS} [..., R, C]; scale: float32; expands(scale, x.shape)", expands=expands)
_GROUPS_SCALED = takes(f"x: {FLOATS} [R, C]; m_splits: {INTEGERS} [G]; scale: float32 [G]")
_STORED = takes(f"data: {_FP8} [..., R, C]; scale_inv: float32; expands(scale_inv, data.shape)", expands=expands)
_IN_BLOCKS = takes(
    f"data: {_FP8} [*B, R, C]; block: value; stored: float32|uint8 [*B, -(-R // block[0]), -(-C // block[1])]"
)


@operation("amax", lambda x: like(x, x.shape[:-2], torch.float32), reference=blocks.amax, takes=_MATRICES)
def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each matrix, float32: [..., R, C] -> [...]. NaN stays; an empty one has 0."""
    from . import triton_tensor

    return triton_tensor.amax(x)


@operation(
    "grouped_amax",
    lambda x, m_splits: like(x, m_splits.shape, torch.float32),
    reference=grouped.grouped_amax,
    takes=_GROUPS,
)
def grouped_amax(x: Tensor, m_splits: Tensor) -> Tensor:
    """Return the largest magnitude in each group of rows of x: [T, C], m_splits [G] integer -> [G] float32."""
    from . import triton_tensor

    return triton_tensor.amax(x, m_splits)


@operation(
    "quantize_per_tensor",
    lambda x, fp8_dtype: like(x, dtype=fp8_dtype),
    reference=reference.quantize_per_tensor,
    takes=_SCALED,
)
def quantize_per_tensor(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return clamp(x * scale) as FP8. scale: float32, broadcastable to x. A NaN stays, infinities saturate."""
    from . import triton_tensor

    return triton_tensor.quantize_per_tensor(x, scale, fp8_dtype)[0]


def _grouped_copies(x: Tensor, m_splits: Tensor, fp8_dtype: torch.dtype, align: int, columnwise: bool) -> list[Output]:
    padded = padded_length(x.shape[0], m_splits.shape[0], align)
    row = like(x, dtype=fp8_dtype)
    return [row, transposed_copy(x, fp8_dtype, padded)] if columnwise else [row]


@operation(
    "quantize_grouped_per_tensor",
    _grouped_copies,
    reference=grouped.quantize_grouped_per_tensor,
    takes=_GROUPS_SCALED,
)
def quantize_grouped_per_tensor(
    x: Tensor, m_splits: Tensor, scale: Tensor, fp8_dtype: torch.dtype, *, align: int = 16, columnwise: bool = True
) -> list[Tensor]:
    """Quantize each group of rows of x [T, C] with its own scale [G], m_splits [G] integer.

    Returns the rowwise copy [T, C], zero past the last group, and if asked for the columnwise one [P, C], in which
    every group begins at a multiple of `align` rows and is followed by zeros up to the next one (see `grouped`).
    """
    from . import triton_tensor

    flags = {"columnwise": columnwise, "m_splits": m_splits, "align": align}
    return triton_tensor.quantize_per_tensor(x, scale, fp8_dtype, **flags)


@operation(
    "dequantize_per_tensor",
    lambda data, dtype: like(data, dtype=dtype),
    reference=reference.dequantize_per_tensor,
    takes=_STORED,
)
def dequantize_per_tensor(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Return data * scale_inv in `dtype`. scale_inv: float32, broadcastable to data."""
    from . import triton_tensor

    return triton_tensor.dequantize_fp8(data, scale_inv, None, dtype)


def _copy_by_blocks(x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str) -> tuple[Output, ...]:
    return tuple(copy_by_blocks(x, block, fp8_dtype, scale_kind))


@operation("quantize_blockwise", _copy_by_blocks, reference=reference.quantize_blockwise, takes=_MATRICES)
def quantize_blockwise(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, *, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Quantize blocks of x: [..., R, C].

    Returns data (fp8_dtype, x's shape) and the scales to multiply with when dequantizing, [..., ceil(R/br),
    ceil(C/bc)]: float32, or uint8 bytes for "e8m0". Infinities saturate; a NaN stays in its element ("e8m0": makes its
    block NaN). scale_kind: "float32", "pow2" or "e8m0".
    """
    from . import triton_blockwise

    _check(block)
    upright = block[0] > block[1]
    wide = (min(block), max(block))
    data, scales = triton_blockwise.quantize_blockwise(
        x, wide, fp8_dtype, scale_kind, epsilon, rowwise=not upright, columnwise=upright
    )
    return data, scales


def _both_by_blocks(x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str) -> tuple[Output, ...]:
    copy_blocks = (block, (block[1], block[0]))
    return tuple(
        output for copy_block in copy_blocks for output in copy_by_blocks(x, copy_block, fp8_dtype, scale_kind)
    )


@operation("quantize_blockwise_both", _both_by_blocks, reference=reference.quantize_blockwise_both, takes=_MATRICES)
def quantize_blockwise_both(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, *, epsilon: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize x: [..., R, C] by `block` and by the transposed block: (row_data, row_scale, col_data, col_scale).

    All four are in x's orientation, each pair as `quantize_blockwise` returns it; on CUDA in one pass over x, for
    blocks of not more rows than columns.
    """
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
    copy_blocks = [(block, rowwise), ((block[1], block[0]), columnwise)]
    groups = m_splits.shape[0]
    wanted = [
        copy_by_blocks(x, copy_block, fp8_dtype, scale_kind, groups)
        for copy_block, is_wanted in copy_blocks
        if is_wanted
    ]
    return [output for copies in wanted for output in copies]


@operation(
    "quantize_grouped_blockwise", _grouped_by_blocks, reference=grouped.quantize_grouped_blockwise, takes=_GROUPS
)
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
    from . import triton_blockwise

    _check(block)
    flags = {"rowwise": rowwise, "columnwise": columnwise, "m_splits": m_splits}
    return triton_blockwise.quantize_blockwise(x, block, fp8_dtype, scale_kind, epsilon, **flags)


@operation(
    "dequantize_blockwise",
    lambda data, dtype: like(data, dtype=dtype),
    reference=reference.dequantize_blockwise,
    takes=_IN_BLOCKS,
)
def dequantize_blockwise(data: Tensor, stored: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return data * scale in `dtype`. data: [..., R, C] FP8; stored: its scales, float32 or uint8 exponents."""
    from . import triton_tensor

    _check(block)
    return triton_tensor.dequantize_fp8(data, stored, block, dtype)
