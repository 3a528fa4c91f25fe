"""The two sides of a GEMM under a recipe, and their product.

On CPU a side is an `Operand`: dequantized values that are exact in the dtype of the GEMM, which the compiler fuses with
the quantization. On an accelerator it is a `ScaledOperand`, the quantized numbers themselves. Either way the contracted
dimension is the last one, so every product is `left @ right^T`:

    fprop  x [T, K] by w [N, K]      dgrad  dy [T, N] by w [K, N]      wgrad  dy [N, T] by x [K, T]
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.kernels.gemm import (
    Operand,
    ScaledOperand,
    epilogue_scale,
    gemm,
    gemm_wgrad_accumulate_,
    scaled_gemm,
    scaled_gemm_accumulate_,
)
from te_models.kernels.gemm.backends import record_mixed_product
from te_models.kernels.gemm.cpu import operand_dtype

from ..quantizer import Fields, HybridQuantizer, IdentityQuantizer, Quantizer, Usage
from ..quantizer.delayed import Float8Quantizer

Side = Operand | ScaledOperand
AnyQuantizer = Quantizer | Float8Quantizer
_DEQUANTIZING_DEVICES = ("cpu",)


def quantized_gemms(device: torch.device) -> bool:
    """Whether GEMMs on this device take the quantized numbers themselves."""
    return device.type not in _DEQUANTIZING_DEVICES


def turned(operand: Operand, usage: Usage) -> Operand:
    """Return a tensor's operand, given in the tensor's own orientation, with the contracted dimension last."""
    return operand if usage == "rowwise" else Operand(operand.values.mT, operand.scale, operand.emulates)


def values_side(quantizer: AnyQuantizer, operand: Operand, usage: Usage) -> Operand:
    """Return what a quantizer's dequantized values are as a side. Where the GEMMs of the device take quantized numbers
    and it has none of this usage, they say so, for their product is a fallback then; unquantized values are none."""
    kind = (quantizer.member(usage) if isinstance(quantizer, HybridQuantizer) else quantizer).FORMAT
    if quantized_gemms(operand.values.device) and kind != IdentityQuantizer.FORMAT:
        operand = Operand(operand.values, operand.scale, kind)
    return turned(operand, usage)


def side(quantizer: AnyQuantizer, x: Tensor, usage: Usage, dtype: torch.dtype, key: Tensor | None = None) -> Side:
    """Quantize x: [..., R, C] for one GEMM: rowwise contracts C, columnwise R."""
    if quantized_gemms(x.device):
        scaled = quantizer.scaled_operand(x, usage, key)
        if scaled is not None:
            return scaled
    return values_side(quantizer, quantizer.operand(x, usage, operand_dtype(x.device, dtype), key), usage)


def side_of_fields(
    quantizer: Quantizer, fields: Fields, usage: Usage, dtype: torch.dtype, shape: tuple[int, ...]
) -> Side:
    """Return stored fields of a matrix [..., R, C] as a side, exactly as they are."""
    device = next(iter(fields.values())).device
    if quantized_gemms(device):
        scaled = quantizer.scaled_operand_of_fields(fields, usage, shape)
        if scaled is not None:
            return scaled
    operand = quantizer.operand_of_fields(fields, usage, operand_dtype(device, dtype), shape)
    return values_side(quantizer, operand, usage)


def plain(side: Side, dtype: torch.dtype) -> Operand:
    """Return a side as dequantized values and the scale that is left for the epilogue."""
    return side.dequantized(dtype) if isinstance(side, ScaledOperand) else side


def both_plain(operation: str, left: Side, right: Side, dtype: torch.dtype) -> tuple[Operand, Operand]:
    """Return both sides dequantized. operation: the one that would take quantized numbers; where either side was to
    come as such, this is counted as a fallback of it."""
    kinds = _kind(left), _kind(right)
    if kinds != (None, None):
        record_mixed_product(operation, kinds[0] or "high precision", kinds[1] or "high precision")
    dtypes = (_exact_dtype(left, dtype), _exact_dtype(right, dtype))
    dtype = torch.float32 if torch.float32 in dtypes else dtypes[0]
    a, b = plain(left, dtype), plain(right, dtype)
    return Operand(a.values.to(dtype), a.scale), Operand(b.values.to(dtype), b.scale)


def _kind(side: Side) -> str | None:
    return side.kind if isinstance(side, ScaledOperand) else side.emulates


def _exact_dtype(side: Side, dtype: torch.dtype) -> torch.dtype:
    if isinstance(side, Operand):
        return side.values.dtype
    return dtype if side.exact_in_bfloat16 else torch.float32


def product(left: Side, right: Side, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return `left @ right^T + bias` in `dtype`: [M, C] by [N, C] -> [M, N]."""
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        return scaled_gemm(left, right, dtype, bias)
    a, b = both_plain("scaled_gemm", left, right, dtype)
    return gemm(a, Operand(b.values.mT, b.scale), dtype, bias)


def accumulate_product_(main_grad: Tensor, left: Side, right: Side, *, accumulate: bool) -> None:
    """Add `left @ right^T` to main_grad [M, N], or write it there."""
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        scaled_gemm_accumulate_(main_grad, left, right, accumulate=accumulate)
    else:
        a, b = both_plain("scaled_gemm", left, right, torch.bfloat16)
        gemm_wgrad_accumulate_(main_grad, a.values.mT, b.values.mT, accumulate, epilogue_scale(a, b))
