"""The exact emulation of a scaled GEMM.

Every E4M3 or E5M2 value is exact in bfloat16, and so is its product with a power of two. A bfloat16 GEMM with float32
accumulation over such values is therefore the recipe's own arithmetic up to the order of summation. A per-tensor
scale is a general float32, so it stays out of the operand and multiplies the product (the epilogue).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Operand(NamedTuple):
    """One side of a GEMM: values exact in their dtype, and the float32 factor (scalar tensor) left for the epilogue."""

    values: Tensor
    scale: Tensor | None


def gemm(left: Operand, right: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return `left @ right + bias` in `dtype`: [M, K] x [K, N] -> [M, N]; bias: [N].

    Both operands have one dtype: bfloat16, or float32 (where values with float32 block scales are exact).
    """
    product = torch.mm(left.values, right.values)
    scales = [s for s in (left.scale, right.scale) if s is not None]
    if scales:
        factor = scales[0] if len(scales) == 1 else scales[0] * scales[1]
        product = product.float() * factor
    if bias is not None:
        product = product + bias
    return product.to(dtype)
