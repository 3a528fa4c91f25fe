"""Dequantizing rows sorted by group, without reading the splits: on CUDA one kernel, elsewhere the definition in torch.

Layouts as in `grouped`: a copy whose blocks span several rows is in padded rows, [P, C], every other in the T rows that
came in. Rows past the last group are zero.
"""

import torch
from torch import Tensor

from ...custom_op import INTEGERS, like, operation, takes
from . import reference


def unpad_rows(y: Tensor, m_splits: Tensor, align: int, rows: int) -> Tensor:
    """Undo `grouped.pad_rows`: [P, C] -> [rows, C], zero past the last group."""
    splits = m_splits.to(torch.int64)
    ends = splits.cumsum(0)
    sizes = (splits + align - 1) // align * align
    shift = sizes.cumsum(0) - sizes - (ends - splits)
    row = torch.arange(rows, device=y.device)
    group = torch.searchsorted(ends, row, right=True)
    inside = group < splits.shape[0]
    slot = row + shift[group.clamp(max=splits.shape[0] - 1)]
    return torch.where(inside[:, None], y[torch.where(inside, slot, 0)], 0)


def definition(
    data: Tensor, stored: Tensor, m_splits: Tensor, rows: int, block: tuple[int, int] | None, dtype: torch.dtype
) -> Tensor:
    """See `dequantize_grouped`."""
    if rows == 0 or data.shape[1] == 0:
        return data.new_empty((rows, data.shape[1]), dtype=dtype)
    groups = m_splits.shape[0]
    if block is not None and block[0] > 1:
        return unpad_rows(reference.dequantize_blockwise(data, stored, block, dtype), m_splits, block[0], rows)
    group = torch.searchsorted(m_splits.to(torch.int64).cumsum(0), torch.arange(rows, device=data.device), right=True)
    if block is None:
        scale = stored[group.clamp(max=groups - 1)]
        values = reference.dequantize_per_tensor(data, scale[:, None], dtype)
    else:
        values = reference.dequantize_blockwise(data, stored, block, dtype)
    return torch.where((group < groups)[:, None], values, 0)


_TAKES = takes(
    f"data: float8_e4m3fn|float8_e5m2 [R, C]; stored: float32|uint8; m_splits: {INTEGERS} [G]; rows: value;"
    "block: value; R >= rows;"
    "(stored.dtype == float32 and stored.shape == (G,)) if block is None else"
    "  stored.shape == (-(-R // block[0]), -(-C // block[1]))",
    float32=torch.float32,
)


@operation(
    "dequantize_grouped",
    lambda data, rows, dtype: like(data, (rows, data.shape[1]), dtype),
    reference=definition,
    takes=_TAKES,
)
def dequantize_grouped(
    data: Tensor, stored: Tensor, m_splits: Tensor, rows: int, block: tuple[int, int] | None, dtype: torch.dtype
) -> Tensor:
    """Return the values of grouped rows, [rows, C] in `dtype`.

    data: FP8, any strides, [rows, C], or [P, C] where a block spans several rows; stored: float32 scales or uint8
    exponents of its blocks, or for block None one float32 scale per group, [G]; m_splits: [G] integer, on the device.
    """
    from . import triton_grouped

    return triton_grouped.dequantize_grouped_fp8(data, stored, m_splits, rows, block, dtype)
