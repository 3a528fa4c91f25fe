"""One GEMM per expert, in high precision or under a recipe: the implementation behind GroupedLinear."""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.kernels.grouped_gemm import grouped_gemm

from .module import compute_dtype


def row_groups(m_splits: Tensor, rows: int) -> Tensor:
    """Return the group of each row, [rows]; rows past the last group get the last group's index."""
    ends = m_splits.cumsum(0)
    group = torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)
    return group.clamp(max=m_splits.shape[0] - 1)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, m_splits: Tensor) -> Tensor:
    """Return `x[g] @ weight[g]^T + bias[g]` for each group of rows.

    x: [T, in], rows sorted by group; weight: [G, out, in]; bias: [G, out] or None; m_splits: [G] integer.
    """
    dtype = compute_dtype(x)
    y = grouped_gemm(x.to(dtype).contiguous(), weight.to(dtype), m_splits)
    return y if bias is None else y + bias.to(dtype)[row_groups(m_splits, x.shape[0])]
