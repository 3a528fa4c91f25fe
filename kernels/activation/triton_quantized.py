"""Activations that hand out FP8, in one pass over the input. T rows, F output columns."""

import triton
import triton.language as tl
from torch import Tensor

from ..quantize.output import QuantizedOutput
from ..quantize.triton_output import Destination, quantized_tile, store_quantized
from .reference import ActivationKind
from .triton import activation_tile, arguments_of, round_as, tile_of_program


# num_rows is specialised: transposed copies are stored 16 bytes at a time where it is a multiple of 16.
@triton.jit(do_not_specialize=["epsilon_bits"])
def activation_quantize_kernel(
    x_ptr,
    probability_ptr,
    scale_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    amax_ptr,
    num_rows,
    alpha,
    offset,
    limit,
    epsilon_bits,
    F: tl.constexpr,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    E4M3: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERFLOW: tl.constexpr,
    OVERFLOW_EXPONENT: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows, columns, inside = tile_of_program(num_rows, F, BLOCK_R, BLOCK_C)
    y = activation_tile(x_ptr, rows, columns, inside, alpha, offset, limit, F, NAME, GATED, CLAMPED)
    if probability_ptr is not None:
        y *= tl.load(probability_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
        y = round_as(y, x_ptr.dtype.element_ty)
    across = tl.cdiv(F, BLOCK_C)
    store_quantized(
        tl.where(inside, y, 0.0),
        scale_ptr,
        row_ptr,
        row_scale_ptr,
        col_ptr,
        col_scale_ptr,
        amax_ptr,
        (tl.program_id(0) // across).to(tl.int64) * BLOCK_R,
        tl.program_id(0) % across * BLOCK_C,
        num_rows,
        F,
        epsilon_bits,
        BLOCK,
        KIND,
        E4M3,
        LARGEST,
        OVERFLOW,
        OVERFLOW_EXPONENT,
        NATIVE,
    )


def activation_quantized(
    x: Tensor, probabilities: Tensor | None, kind: ActivationKind, scale: Tensor | None, output: QuantizedOutput
) -> list[Tensor]:
    """Return what `output` defines of the activation [T, F] of x: [T, 2F] if gated, else [T, F]."""
    x, (numbers, constants) = x.contiguous(), arguments_of(kind, x.dtype)
    rows, columns = x.shape[0], x.shape[1] // (2 if kind.gated else 1)
    destination = Destination(output, x[:, :columns], scale, x.dtype)
    if rows and columns:
        block_r, block_c, warps = quantized_tile(output)
        activation_quantize_kernel[(triton.cdiv(rows, block_r) * triton.cdiv(columns, block_c),)](
            x,
            None if probabilities is None else probabilities.contiguous(),
            *destination.pointers(),
            rows,
            *numbers,
            F=columns,
            **constants,
            BLOCK_R=block_r,
            BLOCK_C=block_c,
            num_warps=warps,
            **destination.constants(),
        )
    return destination.tensors
