"""Blocks of FP8 quantized and decoded on CPU: by compiled functions where they are loaded, else by the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..eager import compiled, eager_on_cpu
from . import reference


def quantize_blockwise(
    x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype, scale_kind: str, *, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_blockwise`."""
    if compiled and eager_on_cpu(x):
        found: tuple[Tensor, Tensor] | None = compiled["quantize_blockwise"](x, block, fp8_dtype, scale_kind, epsilon)
        if found is not None:
            return found
    return reference.quantize_blockwise(x, block, fp8_dtype, scale_kind, epsilon=epsilon)


def dequantize_blockwise(data: Tensor, stored: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """See `reference.dequantize_blockwise`."""
    if compiled and eager_on_cpu(data):
        found: Tensor | None = compiled["dequantize_blockwise"](data, stored, block, dtype)
        if found is not None:
            return found
    return reference.dequantize_blockwise(data, stored, block, dtype)
