"""The two operands of a GEMM under a recipe, the dtype that they are computed with, and their product.

On CPU an operand is an `Operand`: dequantized values that are exact in the dtype of the GEMM. In a graph, one operation
makes the operands of block, MXFP8 and NVFP4 scaling (`kernels/quantize/cpu`). On an accelerator an operand is a
`ScaledOperand`, the quantized numbers themselves. Either way the contracted dimension is the last one, so every GEMM is
`left @ right^T`:

    fprop  x [T, K] by w [N, K]      dgrad  dy [T, N] by w [K, N]      wgrad  dy [N, T] by x [K, T]
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling
from te_models.kernels.custom_op import direct
from te_models.kernels.gemm import (
    Operand,
    ScaledOperand,
    epilogue_scale,
    few_rows,
    gemm,
    gemm_wgrad_accumulate_,
    scaled,
    scaled_gemm,
    scaled_gemm_accumulate_,
)
from te_models.kernels.gemm.backends import record_mixed_product
from te_models.kernels.gemm.cpu import WIDE, operand_dtype, unrounded
from te_models.kernels.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_accumulate_,
    scaled_grouped_gemm,
    scaled_grouped_gemm_wgrad,
    scaled_grouped_gemm_wgrad_accumulate_,
)
from te_models.kernels.grouped_gemm.scaled import dequantized_wgrad

from ..quantizer import Fields, Quantizer, Usage
from ..quantizer.encoding import Scale, Uses
from ..quantizer.group_offsets import GroupOffsets, PaddedRows
from ..quantizer.state import AnyQuantizer
from ..tensor.quantized_tensor import QuantizedTensor

GemmOperand = Operand | ScaledOperand
_DEQUANTIZING_DEVICES = ("cpu",)


def quantized_gemms(device: torch.device) -> bool:
    """Whether GEMMs on this device take the quantized numbers themselves."""
    return device.type not in _DEQUANTIZING_DEVICES


class GemmTarget(NamedTuple):
    """What the GEMMs of one pass take. on: the quantized numbers themselves, or what they dequantize to, which the
    compiler may trace; dtype: of the layer; wide: in which operands that are dequantized are best made."""

    on: Literal["quantized", "dequantized", "traced"]
    dtype: torch.dtype
    wide: torch.dtype


def target(device: torch.device, dtype: torch.dtype) -> GemmTarget:
    """Return what GEMMs of a layer in `dtype` take on this device."""
    if device.type not in _DEQUANTIZING_DEVICES:
        return GemmTarget("quantized", dtype, dtype)
    if torch.compiler.is_compiling() and compiling():
        return GemmTarget("traced", dtype, dtype)
    wide = WIDE.get(dtype) if device.type == "cpu" else operand_dtype(device, dtype)
    if wide is None:
        wide = operand_dtype(device, dtype)
        if not torch.compiler.is_compiling():  # perhaps in another thread: then this was no choice of the machine's
            WIDE[dtype] = wide
    return GemmTarget("dequantized", dtype, wide)


def in_cpu_graph(device: torch.device) -> bool:
    """Whether the compiler is at work for a device whose GEMMs take dequantized values."""
    return device.type in _DEQUANTIZING_DEVICES and torch.compiler.is_compiling() and compiling()


def transposed(operand: Operand, usage: Usage) -> Operand:
    """Return an operand in its tensor's orientation with the contracted dimension last."""
    return operand if usage == "rowwise" else Operand(operand.values.mT, operand.scale, operand.emulates)


def emulating(quantizer: AnyQuantizer, operand: Operand, usage: Usage) -> Operand:
    """Wrap dequantized values for a device without a GEMM for this format; the kind is recorded so that the GEMM is
    reported as a fallback. Values that were never quantized are not reported."""
    return transposed(Operand(operand.values, operand.scale, quantizer.emulated_kind(usage)), usage)


def quantized_operand(
    quantizer: AnyQuantizer, x: Tensor, usage: Usage, dtype: torch.dtype, key: Tensor | None = None
) -> GemmOperand:
    """Quantize x: [..., R, C] for one GEMM: rowwise contracts C, columnwise R. dtype: `GemmTarget.wide`."""
    if x.device.type in _DEQUANTIZING_DEVICES:
        # as `rounded`, without two calls
        found = quantizer.encode(x, Scale(key), Uses((), usage, dtype))
        operand = None if found is None else found.operand
        operand = quantizer.rounded(x, usage, dtype, key) if operand is None else operand
        return operand if usage == "rowwise" else transposed(operand, usage)
    scaled = quantizer.scaled_operand(x, usage, key)
    return emulating(quantizer, quantizer.rounded(x, usage, dtype, key), usage) if scaled is None else scaled


def stored_operand(
    quantizer: Quantizer, fields: Fields, usage: Usage, dtype: torch.dtype, shape: tuple[int, ...]
) -> GemmOperand:
    """Return stored fields of a matrix [..., R, C] as an operand, exactly as they are. dtype: `GemmTarget.wide`."""
    device = next(iter(fields.values())).device
    if device.type in _DEQUANTIZING_DEVICES:
        operand = quantizer.operand_of_fields(fields, usage, dtype, shape)
        return operand if usage == "rowwise" else transposed(operand, usage)
    found = quantizer.operand_of_fields(fields, usage, dtype, shape, quantized=True)
    return emulating(quantizer, found, usage) if isinstance(found, Operand) else found


def stored_for_few_rows(x: Tensor, weight: QuantizedTensor) -> ScaledOperand | few_rows.IntegerOperand | None:
    """Return a stored weight [N, K], or grouped [G, N, K], as numbers that a CPU multiplies the rows x [..., K] by in
    high precision, see `few_rows`; None where what it dequantizes to is multiplied."""
    groups = weight.shape[0] if weight.dim() == 3 else 1
    if not few_rows.uses_few_rows(x, weight, groups):
        return None
    quantizer, fields = weight.quantizer, weight.fields
    operand: Operand | ScaledOperand | few_rows.IntegerOperand | None
    # integers have scales of rows: a stack of them is one matrix of all rows
    operand = quantizer.integer_operand(fields, weight.shape)
    whole = weight.shape == weight.matrix_shape and (quantizer.symmetric or "rowwise" in quantizer.stored_usages())
    if operand is None and whole:
        operand = quantizer.operand_of_fields(fields, "rowwise", x.dtype, weight.matrix_shape, quantized=True)
    return None if operand is None or isinstance(operand, Operand) or operand.inner != x.shape[-1] else operand


# --- products: two quantized operands go to a GEMM that takes quantized numbers, others are dequantized ---------------

grouped_gemm_directly = direct(grouped_gemm)
"""Without the dispatcher's Python where that changes nothing."""


def dequantized(operand: GemmOperand, dtype: torch.dtype) -> Operand:
    """Return an operand as dequantized values and the scale that is left for the epilogue."""
    return operand.dequantized(dtype) if isinstance(operand, ScaledOperand) else operand


def scaled_values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return an operand's values, [..., R, C], with its scale [...] applied."""
    if operand.scale is None:
        return operand.values.to(dtype)
    return (operand.values.float() * operand.scale[..., None, None]).to(dtype)


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


def product(left: GemmOperand, right: GemmOperand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return `left @ right^T + bias` in `dtype`: [M, C] by [N, C] -> [M, N]."""
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        return scaled_gemm(left, right, dtype, bias)
    if (
        isinstance(left, Operand)
        and isinstance(right, Operand)
        and left.emulates is right.emulates is None
        and left.values.dtype == right.values.dtype
    ):
        a, b = left, right
    else:
        a, b = both_dequantized("scaled_gemm", left, right, dtype)
    return gemm(a, Operand(b.values.mT, b.scale), dtype, bias)


def accumulate_product_(main_grad: Tensor, left: GemmOperand, right: GemmOperand, *, accumulate: bool) -> None:
    """Add `left @ right^T` to main_grad [M, N], or write it there."""
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        scaled_gemm_accumulate_(main_grad, left, right, accumulate=accumulate)
    else:
        a, b = both_dequantized("scaled_gemm", left, right, torch.bfloat16)
        gemm_wgrad_accumulate_(main_grad, a.values.mT, b.values.mT, accumulate, epilogue_scale(a, b))


def _contractible(rows: ScaledOperand, dtype: torch.dtype) -> GemmOperand:
    """Return rows as grouped GEMMs take them: dequantized where a block has several rows, because no kernel reads
    those."""
    if rows.block is None or rows.block[0] == 1:
        return rows
    values, scale, _ = rows.dequantized(dtype if rows.exact_in_bfloat16 else torch.float32)
    return Operand(values, scale, f"{rows.kind} rows in {rows.block[0]}x{rows.block[1]} blocks")


def rows_product(
    left: GemmOperand,
    padding: PaddedRows | None,
    weight: GemmOperand,
    offsets: GroupOffsets,
    dtype: torch.dtype,
    *,
    dgrad: bool = False,
) -> Tensor:
    """Return rows times their group's matrix. padding: where the rows of the operand lie; dgrad: whether the weight is
    the transpose of a stack of matrices, as `transposed` makes it."""
    if isinstance(left, ScaledOperand):
        left = _contractible(left, dtype)
    sizes = offsets.m_splits if padding is None else padding.sizes
    if isinstance(left, ScaledOperand) and isinstance(weight, ScaledOperand):
        y = scaled_grouped_gemm(left, weight, sizes, dtype)
        return y if padding is None else padding.unpad(y)
    a, b = both_dequantized("scaled_grouped_gemm", left, weight, dtype)
    scale = None if a.scale is None and b.scale is None else epilogue_scale(a, b)
    x, w = (a.values, b.values) if scale is None else unrounded(a.values, b.values)
    y = grouped_gemm_directly(x, w.mT if dgrad else w, sizes, not dgrad)
    y = y if padding is None else padding.unpad(y)
    return y.to(dtype) if scale is None else scaled(y, offsets.per_row(scale)[:, None], dtype)


def rows_wgrad(left: GemmOperand, right: GemmOperand, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each group's `left @ right^T` over its rows, [G, N, K]."""
    left = _contractible(left, dtype) if isinstance(left, ScaledOperand) else left
    right = _contractible(right, dtype) if isinstance(right, ScaledOperand) else right
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        return scaled_grouped_gemm_wgrad(left, right, sizes, dtype)
    a, b = both_dequantized("scaled_grouped_gemm_wgrad", left, right, dtype)
    return dequantized_wgrad(a, b, sizes, dtype)


def accumulate_rows_wgrad_(
    main_grad: Tensor, left: GemmOperand, right: GemmOperand, sizes: Tensor, *, accumulate: bool
) -> None:
    """Add `rows_wgrad` to main_grad [G, N, K], or write it there."""
    left = _contractible(left, torch.bfloat16) if isinstance(left, ScaledOperand) else left
    right = _contractible(right, torch.bfloat16) if isinstance(right, ScaledOperand) else right
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        scaled_grouped_gemm_wgrad_accumulate_(main_grad, left, right, sizes, accumulate=accumulate)
        return
    a, b = both_dequantized("scaled_grouped_gemm_wgrad", left, right, torch.bfloat16)
    grouped_gemm_wgrad_accumulate_(main_grad, a.values.mT, b.values.mT, sizes, accumulate, epilogue_scale(a, b))


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a bias [N] from dy [..., N], summed in float32."""
    return dy.reshape(-1, dy.shape[-1]).float().sum(0).to(dtype)


def bias_rows_gradient(dy: Tensor, m_splits: Tensor) -> Tensor:
    """Return the gradient of a bias [G, N] from dy [T, N]: a GEMM with ones. Unlike the scatter that autograd would
    derive, it sums in one order everywhere."""
    return grouped_gemm_wgrad(dy, dy.new_ones(dy.shape[0], 1), m_splits).squeeze(-1)
