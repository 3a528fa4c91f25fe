"""The exact emulation of grouped GEMMs on quantized operands: dequantize exactly, multiply, scale each group."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm.cpu import unrounded
from ..gemm.operand import ScaledOperand, emulation_dtype
from ..gemm.reference import epilogue_scale
from .op import grouped_gemm, grouped_gemm_wgrad, grouped_gemm_wgrad_accumulate_


def rows(left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[T, K] x [G, N, K] -> [T, N]."""
    dtype = emulation_dtype(left, right, out_dtype)
    a, b = left.dequantized(dtype), right.dequantized(dtype)
    factor = epilogue_scale(a, b)
    x, w = (a.values, b.values) if factor is None else unrounded(a.values, b.values)
    y = grouped_gemm(x, w, m_splits)
    return (y if factor is None else y.float() * per_row(factor, m_splits, y.shape[0])[:, None]).to(out_dtype)


def wgrad(left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[N, T] x [K, T] -> [G, N, K]."""
    dtype = emulation_dtype(left, right, out_dtype)
    a, b = left.dequantized(dtype), right.dequantized(dtype)
    factor = epilogue_scale(a, b)
    dy, x = (a.values, b.values) if factor is None else unrounded(a.values, b.values)
    dw = grouped_gemm_wgrad(dy.mT, x.mT, m_splits)
    return (dw if factor is None else dw.float() * factor[:, None, None]).to(out_dtype)


def wgrad_accumulate_(
    main_grad: Tensor, left: ScaledOperand, right: ScaledOperand, m_splits: Tensor, accumulate: bool
) -> None:
    """[N, T] x [K, T] into [G, N, K]."""
    dtype = emulation_dtype(left, right, main_grad.dtype)
    a, b = left.dequantized(dtype), right.dequantized(dtype)
    grouped_gemm_wgrad_accumulate_(main_grad, a.values.mT, b.values.mT, m_splits, accumulate, epilogue_scale(a, b))


def per_row(values: Tensor, m_splits: Tensor, rows: int) -> Tensor:
    """Return values[group of the row], [T], for values [G]; 0 past the last group. Never reads the splits."""
    ends = m_splits.cumsum(0)
    group = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)
    groups = values.shape[0]
    return torch.where(group < groups, values[group.clamp(max=groups - 1)], 0)
