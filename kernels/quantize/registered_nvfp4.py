"""NVFP4's Triton kernels as registered ops, opaque to the compiler, each with a fake; `op_nvfp4` calls them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import layout
from .hadamard import SIZE


@torch.library.custom_op("te_models::random_hadamard", mutates_args=())
def random_hadamard(x: Tensor, dim: int) -> Tensor:
    """See `hadamard.random_hadamard`."""
    from . import triton_hadamard

    return triton_hadamard.random_hadamard(x, dim)


@random_hadamard.register_fake
def _(x, dim):
    shape = list(x.shape)
    shape[dim] = -(-shape[dim] // SIZE) * SIZE
    return x.new_empty(shape)


@torch.library.custom_op("te_models::nvfp4_amaxes", mutates_args=())
def nvfp4_amaxes(x: Tensor, m_splits: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `triton_hadamard.nvfp4_amaxes`."""
    from . import triton_hadamard

    return triton_hadamard.nvfp4_amaxes(x, m_splits)


@nvfp4_amaxes.register_fake
def _(x, m_splits):
    shape = x.shape[:-2] if m_splits is None else m_splits.shape
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("te_models::quantize_nvfp4", mutates_args=())
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
    from . import triton_nvfp4

    flags = {"m_splits": m_splits, "key": key, "block_rows": block_rows, "with_rht": with_rht}
    return triton_nvfp4.quantize_nvfp4(x, row_amax, col_amax, streams=(row_stream, col_stream), **flags)


@quantize_nvfp4.register_fake
def _(x, row_amax, col_amax, m_splits, key, row_stream, col_stream, block_rows, with_rht):
    wanted = {"rowwise": row_amax is not None, "columnwise": col_amax is not None}
    groups = 0 if m_splits is None else m_splits.shape[0]
    return layout.empty_nvfp4(x, **wanted, with_rht=with_rht, groups=groups)


@torch.library.custom_op("te_models::dequantize_nvfp4", mutates_args=())
def dequantize_nvfp4(packed: Tensor, scales: Tensor, amax: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """See `triton_nvfp4_decode.dequantize_nvfp4`."""
    from . import triton_nvfp4_decode

    return triton_nvfp4_decode.dequantize_nvfp4(packed, scales, amax, columns, dtype)


@dequantize_nvfp4.register_fake
def _(packed, scales, amax, columns, dtype):
    return packed.new_empty((*packed.shape[:-1], columns), dtype=dtype)
