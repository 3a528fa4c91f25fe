"""The two operands of a GEMM under a recipe, the dtype that they are computed with, and the GEMM of them.

On CPU an operand is an `Operand`: dequantized values that are exact in the dtype of the GEMM. In a graph, one operation
makes the operands of block, MXFP8 and NVFP4 scaling (`kernels/quantize/cpu_graph`). On an accelerator an operand is a
`ScaledOperand`, the quantized numbers themselves. Either way the contracted dimension is the last one, so every GEMM is
`left @ right^T`:

    fprop  x [T, K] by w [N, K]      dgrad  dy [T, N] by w [K, N]      wgrad  dy [N, T] by x [K, T]
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling
from te_models.kernels.gemm import (
    Operand,
    ScaledOperand,
    epilogue_scale,
    few_rows,
    gemm,
    gemm_wgrad_accumulate_,
    scaled_gemm,
    scaled_gemm_accumulate_,
)
from te_models.kernels.gemm.backends import record_mixed_product
from te_models.kernels.gemm.cpu import operand_dtype

from ..quantizer import Fields, Quantizer, Usage
from ..quantizer.state import AnyQuantizer
from ..tensor.quantized_tensor import QuantizedTensor

GemmOperand = Operand | ScaledOperand
_DEQUANTIZING_DEVICES = ("cpu",)


def quantized_gemms(device: torch.device) -> bool:
    """Whether GEMMs on this device take the quantized numbers themselves."""
    return device.type not in _DEQUANTIZING_DEVICES


OperandsOn = Literal["quantized", "dequantized", "traced"]


def operands_on(device: torch.device) -> OperandsOn:
    """Return what GEMMs on this device take: the quantized numbers themselves, or what they dequantize to, which the
    compiler may trace."""
    if device.type not in _DEQUANTIZING_DEVICES:
        return "quantized"
    return "traced" if torch.compiler.is_compiling() and compiling() else "dequantized"


def in_cpu_graph(device: torch.device) -> bool:
    """Whether the compiler is at work for a device whose GEMMs take dequantized values."""
    return operands_on(device) == "traced"


def transposed(operand: Operand, usage: Usage) -> Operand:
    """Return a tensor's operand, which is in the tensor's own orientation, with the contracted dimension last."""
    return operand if usage == "rowwise" else Operand(operand.values.mT, operand.scale, operand.emulates)


def emulating(quantizer: AnyQuantizer, operand: Operand, usage: Usage) -> Operand:
    """Return a quantizer's dequantized values, which an accelerator multiplies where it has no quantized numbers of
    this usage: they say so, for their GEMM is a fallback then; unquantized values are none."""
    return transposed(Operand(operand.values, operand.scale, quantizer.emulated_kind(usage)), usage)


def quantized_operand(
    quantizer: AnyQuantizer, x: Tensor, usage: Usage, dtype: torch.dtype, key: Tensor | None = None
) -> GemmOperand:
    """Quantize x: [..., R, C] for one GEMM: rowwise contracts C, columnwise R."""
    if x.device.type in _DEQUANTIZING_DEVICES:
        operand = quantizer.operand(x, usage, operand_dtype(x.device, dtype), key)
        return operand if usage == "rowwise" else transposed(operand, usage)
    scaled = quantizer.scaled_operand(x, usage, key)
    return emulating(quantizer, quantizer.operand(x, usage, dtype, key), usage) if scaled is None else scaled


def stored_operand(
    quantizer: Quantizer, fields: Fields, usage: Usage, dtype: torch.dtype, shape: tuple[int, ...]
) -> GemmOperand:
    """Return stored fields of a matrix [..., R, C] as an operand, exactly as they are."""
    device = next(iter(fields.values())).device
    if device.type in _DEQUANTIZING_DEVICES:
        operand = quantizer.operand_of_fields(fields, usage, operand_dtype(device, dtype), shape)
        return operand if usage == "rowwise" else transposed(operand, usage)
    scaled = quantizer.scaled_operand_of_fields(fields, usage, shape)
    if scaled is not None:
        return scaled
    return emulating(quantizer, quantizer.operand_of_fields(fields, usage, dtype, shape), usage)


def stored_for_few_rows(x: Tensor, weight: QuantizedTensor) -> ScaledOperand | few_rows.IntegerOperand | None:
    """Return a stored weight [N, K], or grouped [G, N, K], as numbers that a CPU multiplies the rows x [..., K] by in
    high precision, see `few_rows`; None where what it dequantizes to is multiplied."""
    groups = weight.shape[0] if weight.dim() == 3 else 1
    if not few_rows.serves(x, weight, groups):
        return None
    quantizer = weight.quantizer
    operand: ScaledOperand | few_rows.IntegerOperand | None
    # integers have scales of rows: a stack of them is one matrix of all rows
    operand = quantizer.integer_operand(weight.fields, weight.shape)
    whole = weight.shape == weight.matrix_shape and (quantizer.symmetric or "rowwise" in quantizer.stored_usages())
    if operand is None and whole:
        operand = quantizer.scaled_operand_of_fields(weight.fields, "rowwise", weight.matrix_shape)
    return operand if operand is not None and operand.inner == x.shape[-1] else None


def dequantized(operand: GemmOperand, dtype: torch.dtype) -> Operand:
    """Return an operand as dequantized values and the scale that is left for the epilogue."""
    return operand.dequantized(dtype) if isinstance(operand, ScaledOperand) else operand


def both_dequantized(
    operation: str, left: GemmOperand, right: GemmOperand, dtype: torch.dtype
) -> tuple[Operand, Operand]:
    """Return both operands dequantized, in one dtype. operation: the one that would take quantized numbers; where
    either operand was to come as such, this is counted as a fallback of it."""
    if isinstance(left, Operand) and isinstance(right, Operand):
        kinds = left.emulates, right.emulates
        if kinds == (None, None) and left.values.dtype == right.values.dtype:
            return left, right
    else:
        kinds = _kind(left), _kind(right)
    if kinds != (None, None):
        record_mixed_product(operation, kinds[0] or "high precision", kinds[1] or "high precision")
    dtypes = (_exact_dtype(left, dtype), _exact_dtype(right, dtype))
    dtype = torch.float32 if torch.float32 in dtypes else dtypes[0]
    a, b = dequantized(left, dtype), dequantized(right, dtype)
    return Operand(a.values.to(dtype), a.scale), Operand(b.values.to(dtype), b.scale)


def _kind(operand: GemmOperand) -> str | None:
    return operand.kind if isinstance(operand, ScaledOperand) else operand.emulates


def _exact_dtype(operand: GemmOperand, dtype: torch.dtype) -> torch.dtype:
    if isinstance(operand, Operand):
        return operand.values.dtype
    return dtype if operand.exact_in_bfloat16 else torch.float32


def run_gemm(left: GemmOperand, right: GemmOperand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return `left @ right^T + bias` in `dtype`: [M, C] by [N, C] -> [M, N]."""
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        return scaled_gemm(left, right, dtype, bias)
    a, b = both_dequantized("scaled_gemm", left, right, dtype)
    return gemm(a, Operand(b.values.mT, b.scale), dtype, bias)


def accumulate_gemm_(main_grad: Tensor, left: GemmOperand, right: GemmOperand, *, accumulate: bool) -> None:
    """Add `left @ right^T` to main_grad [M, N], or write it there."""
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        scaled_gemm_accumulate_(main_grad, left, right, accumulate=accumulate)
    else:
        a, b = both_dequantized("scaled_gemm", left, right, torch.bfloat16)
        gemm_wgrad_accumulate_(main_grad, a.values.mT, b.values.mT, accumulate, epilogue_scale(a, b))
