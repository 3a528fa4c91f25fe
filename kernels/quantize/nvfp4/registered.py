"""NVFP4's Triton kernels as registered operations, opaque to the compiler; `op_nvfp4` calls them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...custom_op import Output, like, operation
from .. import layout
from ..hadamard import SIZE


def _transformed(x: Tensor, dim: int) -> Output:
    shape = list(x.shape)
    shape[dim] = -(-shape[dim] // SIZE) * SIZE
    return like(x, shape)


@operation("random_hadamard", _transformed)
def random_hadamard(x: Tensor, dim: int) -> Tensor:
    """See `hadamard.random_hadamard`."""
    from .. import triton_hadamard

    return triton_hadamard.random_hadamard(x, dim)


def _amaxes(x: Tensor, m_splits: Tensor | None) -> tuple[Output, Output]:
    amax = like(x, x.shape[:-2] if m_splits is None else m_splits.shape, torch.float32)
    return amax, amax


@operation("nvfp4_amaxes", _amaxes)
def nvfp4_amaxes(x: Tensor, m_splits: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `triton_hadamard.nvfp4_amaxes`."""
    from .. import triton_hadamard

    return triton_hadamard.nvfp4_amaxes(x, m_splits)


def _copies(
    x: Tensor, row_amax: Tensor | None, col_amax: Tensor | None, m_splits: Tensor | None, with_rht: bool
) -> list[Output]:
    wanted = {"rowwise": row_amax is not None, "columnwise": col_amax is not None}
    groups = 0 if m_splits is None else m_splits.shape[0]
    return layout.nvfp4_copies(x, **wanted, with_rht=with_rht, groups=groups)


@operation("quantize_nvfp4", _copies)
def quantize_nvfp4(
    x: Tensor,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    m_splits: Tensor | None,
    key: Tensor | None,
    row_stream: int,
    col_stream: int,
    block_rows: int,
    with_rht: bool,
) -> list[Tensor]:
    """See `triton_nvfp4.quantize_nvfp4`."""
    from . import triton as triton_nvfp4

    flags = {"m_splits": m_splits, "key": key, "block_rows": block_rows, "with_rht": with_rht}
    return triton_nvfp4.quantize_nvfp4(x, row_amax, col_amax, streams=(row_stream, col_stream), **flags)


@operation("dequantize_nvfp4", lambda packed, columns, dtype: like(packed, (*packed.shape[:-1], columns), dtype))
def dequantize_nvfp4(packed: Tensor, scales: Tensor, amax: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """See `triton_nvfp4_decode.dequantize_nvfp4`."""
    from . import triton_decode as triton_nvfp4_decode

    return triton_nvfp4_decode.dequantize_nvfp4(packed, scales, amax, columns, dtype)
