"""Quantizing rows sorted by group, every group by itself: the definition, in torch, without reading the splits.

T rows, G groups, m_splits [G] integer. Blocks that span rows must not span two groups, and a hardware GEMM that
contracts over rows wants every group to begin at a multiple of some rows. So copies whose blocks span rows, and
columnwise copies, are in padded rows: group g begins where the padded groups before it end, its rows are followed by
zeros up to a multiple of `align`, and P rows, a function of the shapes alone, hold any splits. Copies whose blocks lie
in one row stay in the T rows that they came in.
"""

import torch
from torch import Tensor

from ..eager import eager_on_cpu
from .reference import quantize_blockwise, quantize_per_tensor

_FEW = 8
"""Groups that are copied one by one where the splits may be read: faster than an index of all rows."""


def padded_length(rows: int, groups: int, align: int) -> int:
    """Return P, the most padded rows that T rows in G groups can need."""
    return (rows + groups * (align - 1)) // align * align if rows else 0


def _group_of(ends: Tensor, length: int) -> Tensor:
    """Return the group of positions 0..length-1, G past the last: [length]."""
    return torch.searchsorted(ends, torch.arange(length, device=ends.device), right=True)


def pad_rows(x: Tensor, m_splits: Tensor, align: int) -> Tensor:
    """[T, C] -> [P, C], zeros where there is no row."""
    length = padded_length(x.shape[0], m_splits.shape[0], align)
    may_read = eager_on_cpu(x) and eager_on_cpu(m_splits)
    if may_read and m_splits.shape[0] <= _FEW:
        out, begin, place = x.new_zeros((length, x.shape[1])), 0, 0
        for rows in m_splits.tolist():
            out[place : place + rows] = x[begin : begin + rows]
            begin, place = begin + rows, place + -(-rows // align) * align
        return out
    splits = m_splits.to(torch.int64)
    sizes = (splits + align - 1) // align * align
    ends, padded_ends = splits.cumsum(0), sizes.cumsum(0)
    if may_read:  # half the operations
        shift = padded_ends - sizes - (ends - splits)
        slots = shift.repeat_interleave(splits)
        slots += torch.arange(slots.shape[0], device=slots.device)
        return x.new_zeros((length, x.shape[1])).index_copy_(0, slots, x[: slots.shape[0]])
    slot = torch.arange(length, device=x.device)
    group = _group_of(padded_ends, slot.shape[0]).clamp(max=splits.shape[0] - 1)
    source = slot - (padded_ends - sizes)[group] + (ends - splits)[group]
    used = source < ends[group]
    return torch.where(used[:, None], x[torch.where(used, source, 0)], 0)


def grouped_amax(x: Tensor, m_splits: Tensor) -> Tensor:
    """Return the largest magnitude in each group of rows of x: [T, C] -> [G] float32, 0 for an empty group."""
    groups = m_splits.shape[0]
    if x.numel() == 0:
        return x.new_zeros(groups, dtype=torch.float32)
    rows = x.abs().amax(1).float()
    mine = _group_of(m_splits.to(torch.int64).cumsum(0), x.shape[0]) == torch.arange(groups, device=x.device)[:, None]
    return torch.where(mine, rows, 0.0).amax(1)


def quantize_grouped_per_tensor(
    x: Tensor, m_splits: Tensor, scale: Tensor, fp8_dtype: torch.dtype, *, align: int = 16, columnwise: bool = True
) -> list[Tensor]:
    """As the public function: the rowwise copy [T, C], and if asked for the columnwise one [P, C]."""
    if x.numel() == 0:
        padded = padded_length(x.shape[0], scale.shape[0], align)
        empty = [x.to(fp8_dtype), x.new_empty((padded, x.shape[1]), dtype=fp8_dtype)]
        return empty if columnwise else empty[:1]
    group = _group_of(m_splits.to(torch.int64).cumsum(0), x.shape[0])
    inside, mine = group < scale.shape[0], group.clamp(max=scale.shape[0] - 1)
    data = quantize_per_tensor(torch.where(inside[:, None], x, 0), scale[mine][:, None], fp8_dtype)
    if not columnwise:
        return [data]
    # FP8 tensors cannot be indexed everywhere; their bytes can
    return [data, pad_rows(data.view(torch.uint8), m_splits, align).view(fp8_dtype)]


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
    """As the public function: data and scales of each copy asked for; scales [P / rows of the block, ...]."""
    copies = [block] if rowwise else []
    copies += [(block[1], block[0])] if columnwise else []
    found: list[Tensor] = []
    for copy in copies:
        values = x if copy[0] == 1 else pad_rows(x, m_splits, copy[0])
        found += quantize_blockwise(values, copy, fp8_dtype, scale_kind, epsilon=epsilon)
    return found
