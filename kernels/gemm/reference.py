"""The exact emulation of a scaled GEMM, and the product that is added into a gradient.

Every E4M3 or E5M2 value is exact in bfloat16, and so is its product with a power of two. A bfloat16 GEMM with float32
accumulation over such values is therefore the recipe's own arithmetic up to the order of summation. A per-tensor
scale is a general float32, so it stays out of the operand and multiplies the product (the epilogue).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..quantize.eager import eager_on_cpu
from ..without_autocast import without_autocast
from .cpu import WIDE, in_float32
from .float32 import gemm_float32

# Rows of a product computed at a time where it needs a buffer: the buffer then stays in the cache.
_CHUNK = 256


class Operand(NamedTuple):
    """One side of a GEMM: values exact in their dtype, and the float32 factor (scalar tensor) left for the epilogue.

    emulates: the kind of the quantized numbers that a GEMM was to take in place of these values; None: it was not.
    """

    values: Tensor
    scale: Tensor | None
    emulates: str | None = None


def epilogue_scale(left: Operand, right: Operand) -> Tensor | None:
    """Return the factor that two operands leave for the epilogue of their product."""
    if left.scale is None or right.scale is None:
        return left.scale if right.scale is None else right.scale
    return left.scale * right.scale


def gemm(left: Operand, right: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return `left @ right + bias` in `dtype`: [M, K] x [K, N] -> [M, N]; bias: [N].

    Both operands have one dtype: bfloat16, or float32 (where values with float32 block scales are exact, and where
    the machine multiplies 16-bit matrices so: then the product is rounded once, at the end).
    """
    a, b = left.values, right.values
    scale = None if left.scale is None and right.scale is None else epilogue_scale(left, right)
    narrow = not torch.compiler.is_compiling() and WIDE.get(a.dtype) is a.dtype  # as `in_float32`, without the call
    if a.dtype != torch.float32 and not narrow and in_float32(a):
        if scale is None:
            return gemm_float32(a, b, bias, dtype)
        product = gemm_float32(a, b, None, torch.float32)
    elif a.is_meta or not torch.is_autocast_enabled(a.device.type):
        product = torch.mm(a, b)
    else:
        with without_autocast(a):
            product = torch.mm(a, b)
    if scale is not None:
        return scaled(product, scale, dtype, bias)
    return (product if bias is None else product + bias).to(dtype)


def scaled(product: Tensor, scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return `scale * product + bias` in `dtype`, computed in float32, of a product [M, N] of the caller's own: where
    nothing observes it, eager code on a CPU overwrites it, by _CHUNK rows at a time. scale: of all, or of each row
    [M, 1]."""
    if torch.is_grad_enabled() or not eager_on_cpu(product):
        wide = product.float() * scale
        return (wide if bias is None else wide + bias).to(dtype)
    out = product if product.dtype == dtype else torch.empty(product.shape, dtype=dtype, device=product.device)
    for begin in range(0, product.shape[0], _CHUNK):
        part = product[begin : begin + _CHUNK]
        rows = part.float().mul_(scale[begin : begin + _CHUNK] if scale.dim() else scale)
        if bias is not None:
            rows += bias
        if rows is not part or out is not product:
            out[begin : begin + _CHUNK] = rows
    return out


def accumulate_product(out: Tensor, left: Tensor, right: Tensor, accumulate: bool, scale: Tensor | None) -> None:
    """Add `scale * left @ right` to out, or write it there: [M, K] x [K, N] into [M, N]; scale: a scalar tensor.

    Summed in float32 and rounded once, to out's dtype. A CPU has no bfloat16 GEMM with a float32 result, so there the
    GEMM multiplies the operands' values in float32, where they are exact: 3 to 4 times the time where the CPU
    multiplies bfloat16 (AVX512-BF16). The product is complete before it is added, in every layout of the weights alike:
    gradients of equal rows are then equal bit for bit.
    """
    if out.device.type != "cpu":
        _accumulate_on_device(out, left, right, accumulate, scale)
        return
    factor, right = None if scale is None else scale.item(), right.float()
    buffer = right.new_empty(min(_CHUNK, out.shape[0]), out.shape[1])
    for begin in range(0, out.shape[0], _CHUNK):
        target = out[begin : begin + _CHUNK]
        product = torch.mm(left[begin : begin + _CHUNK].float(), right, out=buffer[: target.shape[0]])
        if factor is not None:
            product *= factor
        if accumulate:
            target += product
        else:
            target.copy_(product)


def _accumulate_on_device(out: Tensor, left: Tensor, right: Tensor, accumulate: bool, scale: Tensor | None) -> None:
    """Never read the scale on the host; a product that still has to be scaled or cast stays in float32."""
    if scale is None and out.dtype in (left.dtype, torch.float32):
        if accumulate:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
        return
    product = torch.mm(left, right, out_dtype=torch.float32)
    if scale is not None:
        product *= scale
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)
