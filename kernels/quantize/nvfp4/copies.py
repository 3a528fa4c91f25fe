"""The definition of NVFP4's columnwise copy, of both copies of a matrix, and of grouped rows, in torch.

The columnwise copy quantizes the transpose, stored transposed. With the random Hadamard transform it quantizes the
transform along the rows, of the values in bfloat16: its rows are rounded up to a multiple of 16, and its amax is the
one after the transform. Stochastic rounding draws the bits of an element from its row-major index in its copy, each
copy from a different stream.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..fp8.blocks import once_per_block
from ..fp8.grouped import grouped_amax, pad_rows, padded_length
from ..hadamard import random_hadamard
from .cpu import quantize_nvfp4
from .reference import BLOCK


def transformed(x: Tensor, with_rht: bool) -> Tensor:
    """Return what the columnwise copy is made of, in x's orientation."""
    return random_hadamard(x.to(torch.bfloat16), -2) if with_rht else x


def _transposed(x: Tensor) -> Tensor:
    """Return the transpose, lying so in memory: a buffer, or the compiler reads x across its rows in every loop."""
    return once_per_block(x.mT.contiguous())


def quantize_nvfp4_transposed(
    x: Tensor,
    *,
    with_rht: bool = False,
    amax: Tensor | None = None,
    key: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the columnwise copy of x [..., R, C]: packed [..., C, ceil(R / 2)], scales [..., C, ceil(R / 16)], amax.

    amax: [...], the amax of the transformed matrices, if known.
    """
    return quantize_nvfp4(_transposed(transformed(x, with_rht)), amax=amax, key=key, stream=stream)


def transpose_nvfp4(packed: Tensor, scales: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the columnwise copy of a matrix [..., R, columns] of 16x16 blocks from its rowwise one: the same numbers,
    packed along the rows, [..., columns, ceil(R / 2)], and their scales, [..., columns, ceil(R / 16)]."""
    rows = packed.shape[-2]
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)[..., :columns].mT
    if rows % 2:
        codes = F.pad(codes, (0, 1))
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous()
    # by their bytes: FP8 tensors cannot be repeated everywhere
    blocks = scales.view(torch.uint8)[..., ::BLOCK, :].mT
    return packed, blocks.repeat_interleave(BLOCK, -2)[..., :columns, :].contiguous().view(scales.dtype)


def _of_group(values: Tensor, splits: Tensor, length: int) -> Tensor:
    """Return the value of the group of each of `length` rows, zero past the last group: [G] -> [length]."""
    group = torch.searchsorted(splits.cumsum(0), torch.arange(length, device=splits.device), right=True)
    return torch.where(group < splits.shape[0], values[group.clamp(max=splits.shape[0] - 1)], 0.0)


def quantize_grouped_nvfp4(
    x: Tensor,
    m_splits: Tensor,
    *,
    with_rht: bool = False,
    key: Tensor | None = None,
    streams: tuple[int, int] = (0, 1),
    rowwise: bool = True,
    columnwise: bool = True,
    quantize: Callable[..., tuple[Tensor, Tensor, Tensor]] = quantize_nvfp4,
) -> list[Tensor]:
    """As the public function. quantize: `quantize_nvfp4`, or without a key `quantize_four_over_six`."""
    splits = m_splits.to(torch.int64)
    rows, groups = x.shape[0], splits.shape[0]
    drawn = [{} if key is None else {"key": key, "stream": stream} for stream in streams]
    found: list[Tensor] = []
    if rowwise:
        amax = grouped_amax(x, splits)
        own = _of_group(amax, splits, rows)[:, None]
        found += [*quantize(x, amax=own, **drawn[0])[:2], amax]
    if columnwise:
        sizes = (splits + BLOCK - 1) // BLOCK * BLOCK
        padded = x.new_empty((0, x.shape[1])) if x.numel() == 0 else pad_rows(x, splits, BLOCK)
        padded = transformed(padded, with_rht)
        amax = grouped_amax(padded, sizes)
        own = _of_group(amax, sizes // BLOCK, padded_length(rows, groups, BLOCK) // BLOCK)[None]
        found += [*quantize(_transposed(padded), amax=own, **drawn[1])[:2], amax]
    return found
