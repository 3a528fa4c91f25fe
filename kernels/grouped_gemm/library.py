"""Grouped GEMMs on quantized operands by way of torch's own: one call, or one scaled GEMM per group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from ..gemm.op import scaled_gemm
from ..gemm.operand import ScaledOperand
from ..gemm.transpose import k_contiguous
from .emulation import per_row
from .reference import split_bounds


def rows(left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, split_accumulation: bool) -> Tensor:
    """Per-tensor E4M3 into bfloat16: torch takes one scale per row and per column, so each group's is repeated."""
    ends = m_splits.cumsum(0)
    total, members = left.outer, right.data.shape[0]
    y = F.scaled_grouped_mm(  # pyright: ignore[reportAttributeAccessIssue]
        k_contiguous(left.data),
        k_contiguous(right.data).mT,
        per_row(left.scale_inv, m_splits, total),
        ScalingType.RowWise,
        right.scale_inv[:, None].expand(members, right.outer).contiguous(),
        ScalingType.RowWise,
        offs=ends.to(torch.int32),
        output_dtype=torch.bfloat16,
        use_fast_accum=not split_accumulation,
    )
    # rows past the last group are left unwritten
    return torch.where((torch.arange(total, device=y.device) < ends[-1])[:, None], y, 0)


def loop(
    left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, out_dtype: torch.dtype, split_accumulation: bool
) -> Tensor:
    """One scaled GEMM per group. The host waits for the splits."""
    out = left.data.new_zeros((left.outer, right.outer), dtype=out_dtype)
    for g, (begin, end) in enumerate(split_bounds(m_splits, left.outer)):
        if end > begin:
            scale = left.scale_inv[g] if left.block is None else left.scale_inv[begin:end]
            amax = None if left.amax is None else left.amax[g]
            mine = left._replace(data=left.data[begin:end], scale_inv=scale, amax=amax)
            out[begin:end] = scaled_gemm(mine, right.member(g), out_dtype, split_accumulation=split_accumulation)
    return out
