"""Copies of FP8 operands with the contracted dimension contiguous, which is the only way FP8 tensor cores read them."""

from __future__ import annotations

import torch
from torch import Tensor


def k_contiguous(data: Tensor) -> Tensor:
    """Return data [..., outer, K] itself where K is contiguous and rows do not overlap, else such a copy of it.

    On CUDA the copy is one Triton kernel that reads and writes whole lines. torch's own copy of a transposed view of
    bytes is coalesced on one side only; it serves elsewhere.
    """
    if data.stride(-1) == 1 and data.stride(-2) >= data.shape[-1]:
        return data
    if not data.is_cuda:
        return data.contiguous()
    from . import triton_transpose

    out = torch.empty_like(data, memory_format=torch.contiguous_format)
    triton_transpose.copy_transposed(data.view(torch.uint8), out.view(torch.uint8))
    return out
