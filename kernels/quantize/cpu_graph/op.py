"""Quantized and dequantized operands, in a CPU graph as one registered operation each.

Traced as plain torch, every operand of every GEMM is compiled by itself, which takes several times as long as the rest
of a model. The numbers are the same, and a step takes about as long: there is little to fuse with but the reading of x.
Eagerly, in an exported program, and in a graph of a process without a C++ compiler, the definitions run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiling import compiling
from ...custom_op import Output, like, operation
from ...torch_versions import exporting
from .. import hadamard
from ..fp8 import blocks, rounding
from ..nvfp4 import cpu as nvfp4
from ..nvfp4 import op as nvfp4_op
from . import library

__all__ = ["random_hadamard", "round_blockwise", "round_nvfp4"]


def in_cpu_graph(x: Tensor) -> bool:
    """Whether x is traced for a graph that a CPU runs, has a dtype that is served, and no gradient is wanted: that of a
    rounding, where anybody asks for it, is that of the arithmetic which defines it."""
    if not torch.compiler.is_compiling() or not compiling() or exporting():
        return False
    if x.device.type != "cpu" or x.dtype not in library.DTYPES:
        return False
    return not (x.requires_grad and torch.is_grad_enabled())


@operation(
    "round_blockwise",
    lambda x, dtype: like(x, dtype=dtype),
    reference=rounding.round_blockwise,
    serves=in_cpu_graph,
    cpu_only=True,
)
def round_blockwise(
    x: Tensor,
    block: tuple[int, int],
    fp8_dtype: torch.dtype,
    scale_kind: str,
    dtype: torch.dtype,
    *,
    epsilon: float = 0.0,
) -> Tensor:
    """Return `dequantize_blockwise` of `quantize_blockwise` in `dtype`: x [..., R, C] as its blocks hold it."""
    if not library.available():
        return rounding.round_blockwise(x, block, fp8_dtype, scale_kind, dtype, epsilon=epsilon)
    return library.round_fp8(x, block, fp8_dtype, scale_kind, dtype, epsilon)


def _rotated(x: Tensor) -> Output:
    rows = -(-x.shape[-2] // hadamard.SIZE) * hadamard.SIZE
    return like(x, (*x.shape[:-2], rows, x.shape[-1]))


@operation("random_hadamard_rows", _rotated, cpu_only=True)
def _random_hadamard_rows(x: Tensor) -> Tensor:
    return library.random_hadamard(x) if library.available() else nvfp4_op.random_hadamard(x, -2)


def random_hadamard(x: Tensor, dim: int = -1) -> Tensor:
    """Transform groups of 16 along `dim` (-1 or -2): see `nvfp4.op.random_hadamard`."""
    if dim == -2 and x.dtype == torch.bfloat16 and in_cpu_graph(x):
        return _random_hadamard_rows(x)
    return nvfp4_op.random_hadamard(x, dim)


@operation("matrix_amax", lambda x: like(x, x.shape[:-2], torch.float32), cpu_only=True)
def _amax(x: Tensor) -> Tensor:
    return library.amax(x) if library.available() else blocks.amax(x)


@operation("round_nvfp4", lambda x, dtype: like(x, dtype=dtype), cpu_only=True)
def _round_nvfp4(
    x: Tensor, dtype: torch.dtype, block: tuple[int, int], amax: Tensor, key: Tensor | None, stream: int
) -> Tensor:
    if not library.available():
        return nvfp4.round_nvfp4(x, dtype, block=block, amax=amax, key=key, stream=stream)[0]
    random = None if key is None else library.random_bits(key, stream, x.numel())
    return library.round_nvfp4(x, block, amax, random, dtype)


def round_nvfp4(
    x: Tensor,
    dtype: torch.dtype,
    *,
    block: tuple[int, int] = (1, nvfp4.BLOCK),
    amax: Tensor | None = None,
    key: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantize and decode at once: see `nvfp4.reference.round_nvfp4`."""
    if not (torch.compiler.is_compiling() and in_cpu_graph(x)):
        return nvfp4.round_nvfp4(x, dtype, block=block, amax=amax, key=key, stream=stream)
    amax = _amax(x) if amax is None else amax
    return _round_nvfp4(x, dtype, list(block), amax, key, stream), amax
