"""Public GEMM on quantized operands.

`scaled_gemm` multiplies the quantized numbers themselves where the hardware can. On CPU it is the exact emulation, in
plain torch, so that the compiler fuses it with the quantization around it; on an accelerator it is one registered op,
whose backend is chosen, counted and reported at run time (`backends`). `gemm` multiplies operands that already are
dequantized.
"""

import torch
from torch import Tensor

from ..custom_op import Output, flatten, like, operation
from . import few_rows, native
from .backends import EMULATION, hardware, in_plain_torch, record_choice
from .choice import choose_gemm
from .cpu import in_float32
from .operand import ScaledOperand, emulation_dtype
from .reference import Operand, gemm


def scaled_gemm(
    left: ScaledOperand,
    right: ScaledOperand,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    split_accumulation: bool = True,
    strict: bool = False,
) -> Tensor:
    """Return `left @ right^T + bias` in `out_dtype`: [M, K] x [N, K] -> [M, N]; bias: [N].

    split_accumulation: use a new float32 accumulator for each 128 values of K (blocks always do); off, tensor
    cores may keep fewer bits across all of K. strict: ValueError rather than the emulation. Raises ValueError where
    operands do not fit.
    """
    _check(left, right)
    if in_plain_torch(left.data.device):
        record_choice(choose_gemm(left, right, out_dtype, hardware(left.data.device)), strict=strict)
        return emulate(left, right, out_dtype, bias)
    return _scaled_gemm(*flatten(left), *flatten(right), out_dtype, bias, split_accumulation, strict)


def scaled_gemm_accumulate_(
    main_grad: Tensor, left: ScaledOperand, right: ScaledOperand, *, accumulate: bool = True, strict: bool = False
) -> None:
    """Add `left @ right^T` to main_grad [M, N], or write it there where `accumulate` is False, in its dtype."""
    product = scaled_gemm(left, right, torch.float32, strict=strict)
    if product.shape != main_grad.shape:
        raise ValueError(f"main_grad is {tuple(main_grad.shape)}, but the weight gradient is {tuple(product.shape)}")
    if accumulate:
        main_grad.add_(product)
    else:
        main_grad.copy_(product)


def explain_gemm(left: ScaledOperand | Tensor, right: ScaledOperand, out_dtype: torch.dtype) -> str:
    """Say in a sentence which backend `scaled_gemm` takes for such operands, and why not a faster one.

    left may be rows [M, K] in high precision, where no gradient is wanted: then it says whether a CPU multiplies the
    stored weight or what it dequantizes to, see `few_rows`.
    """
    if isinstance(left, Tensor):
        right.check("right")
        if left.dim() != 2 or left.shape[1] != right.inner or left.dtype != out_dtype:
            raise ValueError(
                f"left is {left.dtype} {tuple(left.shape)}; rows for {out_dtype} are of that and [M, {right.inner}]"
            )
        return str(few_rows.choose_stored(left, right))
    _check(left, right)
    choice = choose_gemm(left, right, out_dtype, hardware(left.data.device))
    wide = choice.backend == EMULATION and in_float32(left.data.new_empty(0, dtype=out_dtype))
    return f"{choice}; this CPU multiplies the dequantized values in float32" if wide else str(choice)


def emulate(left: ScaledOperand, right: ScaledOperand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Multiply exactly dequantized operands."""
    dtype = emulation_dtype(left, right, out_dtype)
    a, b = left.dequantized(dtype), right.dequantized(dtype)
    return gemm(a, Operand(b.values.mT, b.scale), out_dtype, bias)


def _check(left: ScaledOperand, right: ScaledOperand) -> None:
    left.check("left")
    right.check("right")
    if left.data.dim() != 2 or right.data.dim() != 2:
        raise ValueError(f"a GEMM takes two matrices, got {left.data.dim()} and {right.data.dim()} dimensions")
    if left.inner != right.inner:
        raise ValueError(f"left contracts {left.inner} values and right {right.inner}; both have the same K")


def _product(left: ScaledOperand, right: ScaledOperand, out_dtype: torch.dtype) -> Output:
    return like(left.data, (left.outer, right.outer), out_dtype)


@operation("scaled_gemm", _product)
def _scaled_gemm(
    left: ScaledOperand,
    right: ScaledOperand,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    split_accumulation: bool,
    strict: bool,
) -> Tensor:
    choice = choose_gemm(left, right, out_dtype, hardware(left.data.device))
    record_choice(choice, strict=strict)
    if choice.backend == "native":
        return native.scaled_gemm(left, right, out_dtype, bias, split_accumulation)
    if choice.backend == "triton":
        from . import triton as kernels

        out = left.data.new_empty((left.outer, right.outer), dtype=out_dtype)
        return kernels.scaled_gemm(left, right, out, bias, split_accumulation=split_accumulation)
    return emulate(left, right, out_dtype, bias)
