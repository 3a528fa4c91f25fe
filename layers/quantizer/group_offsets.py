"""Where the rows of a grouped input lie, as tensors: nothing here reads the splits on the host.

T rows sorted by group, G groups. Blocks that span several rows must not span two groups, so such a quantization runs
on a padded copy in which every group starts at a multiple of the block's rows; the padding is zero, invisible outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

from te_models.kernels.asserted import asserted, host_reads
from te_models.kernels.compiling import compiling


def check_row_counts(m_splits: Tensor, rows: int) -> None:
    """Raise ValueError unless m_splits, [G] integer, are from 0 on and add up to at most `rows`.

    A graph raises RuntimeError when it runs. Eagerly on an accelerator, where looking makes the host wait, nothing is
    checked.
    """
    if type(m_splits) is Tensor and host_reads(m_splits):
        splits = m_splits.tolist()
        if min(splits) < 0 or sum(splits) > rows:
            allowed = f"numbers from 0 on that add up to at most {rows}, the number of rows"
            raise ValueError(f"m_splits is {splits}; allowed: {allowed}, and these add up to {sum(splits)}")
    elif compiling():
        asserted(
            (m_splits >= 0).all() & (m_splits.sum() <= rows),
            "m_splits are wrong; allowed: numbers from 0 on that add up to at most the number of rows",
        )


@dataclass(frozen=True)
class GroupOffsets:
    """m_splits: [G] int64 rows per group; ends: [G] their running sum; group: [T] each row's group, G past the end."""

    m_splits: Tensor
    ends: Tensor
    group: Tensor

    @staticmethod
    def of(m_splits: Tensor, rows: int) -> GroupOffsets:
        """Locate `rows` rows."""
        m_splits = m_splits.to(torch.int64)
        ends = m_splits.cumsum(0)
        group = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)
        return GroupOffsets(m_splits, ends, group)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (m_splits, ends, group), from which the constructor makes an equal value."""
        return self.m_splits, self.ends, self.group

    @property
    def num_groups(self) -> int:
        """G."""
        return self.m_splits.shape[0]

    def per_row(self, values: Tensor) -> Tensor:
        """Return values[group of the row], [T, ...], for values [G, ...]; zero in rows past the last group."""
        inside = (self.group < self.num_groups).view(-1, *(1,) * (values.dim() - 1))
        return torch.where(inside, values[self.group.clamp(max=self.num_groups - 1)], 0)

    def count(self) -> Tensor:
        """Return how many of the rows are in a group: int64 []."""
        return (self.group < self.num_groups).sum()

    def zero_outside(self, x: Tensor) -> Tensor:
        """Return x: [T, C] with zeros in the rows past the last group."""
        return torch.where((self.group < self.num_groups)[:, None], x, 0)

    def amax(self, x: Tensor) -> Tensor:
        """Return the largest magnitude in each group of rows of x: [T, C] -> [G] float32, 0 for an empty group."""
        rows = x.abs().amax(1).float() if x.shape[1] else x.new_zeros(x.shape[0], dtype=torch.float32)
        mine = self.group == torch.arange(self.num_groups, device=rows.device)[:, None]
        magnitudes = torch.where(mine, rows, 0.0)
        if not guard_or_false(x.shape[0] != 0):  # in a graph that learns it when it runs, there may be no row
            magnitudes = torch.cat([magnitudes, magnitudes.new_zeros(self.num_groups, 1)], dim=1)
        return magnitudes.amax(1)

    def padded(self, align: int) -> PaddedRows:
        """Return the layout in which every group starts at a multiple of `align`."""
        rows, begins = self.group.shape[0], self.ends - self.m_splits
        sizes = (self.m_splits + align - 1) // align * align
        ends = sizes.cumsum(0)
        shift = ends - sizes - begins
        # the most rows that padding can need, a function of the shapes alone
        length = (rows + self.num_groups * (align - 1)) // align * align if guard_or_true(rows != 0) else 0
        slot = torch.arange(length, device=ends.device)
        group = torch.searchsorted(ends, slot, right=True).clamp(max=self.num_groups - 1)
        source = slot - shift[group]
        used = (source < self.ends[group]) & (slot < ends[-1])
        target = torch.arange(rows, device=ends.device) + self.per_row(shift)
        return PaddedRows(sizes, torch.where(used, source, 0), used, target)


@dataclass(frozen=True)
class PaddedRows:
    """sizes: [G] padded rows per group; source: [P] original row of each slot; used: [P] whether the slot holds one;
    target: [T] slot of each original row."""

    sizes: Tensor
    source: Tensor
    used: Tensor
    target: Tensor

    def groups(self) -> GroupOffsets:
        """Locate the padded rows; padding past the last group belongs to none."""
        return GroupOffsets.of(self.sizes, self.used.shape[0])

    def pad(self, x: Tensor) -> Tensor:
        """[T, C] -> [P, C], zeros in unused slots."""
        if not guard_or_false(x.shape[0] != 0):  # in a graph that learns it when it runs, there may be no row to read
            x = torch.cat([x, x.new_zeros(1, x.shape[1])])
        return torch.where(self.used[:, None], x[self.source], 0)

    def unpad(self, y: Tensor) -> Tensor:
        """[P, C] -> [T, C]."""
        return y[self.target]
