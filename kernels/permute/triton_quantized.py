"""Permutation, padding and quantization in one pass: a program gathers a tile of rows and stores its copies.

T tokens, K experts per token, H hidden, R rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..quantize.output import QuantizedOutput
from ..quantize.triton_output import Destination, quantized_tile, store_quantized


# num_rows is specialised: transposed copies are stored 16 bytes at a time where it is a multiple of 16.
@triton.jit(do_not_specialize=["epsilon_bits"])
def permute_quantize_kernel(
    x_ptr,
    slot_of_row_ptr,
    scale_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    amax_ptr,
    num_rows,
    epsilon_bits,
    H: tl.constexpr,
    K: tl.constexpr,
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
    program, across = tl.program_id(0), tl.cdiv(H, BLOCK_C)
    first_row = (program // across).to(tl.int64) * BLOCK_R
    first_column = program % across * BLOCK_C
    rows, columns = first_row + tl.arange(0, BLOCK_R), first_column + tl.arange(0, BLOCK_C)
    slots = tl.load(slot_of_row_ptr + rows, mask=rows < num_rows, other=-1)
    inside = (slots >= 0)[:, None] & (columns < H)[None, :]
    x = tl.load(x_ptr + (slots // K)[:, None] * H + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    store_quantized(
        x,
        scale_ptr,
        row_ptr,
        row_scale_ptr,
        col_ptr,
        col_scale_ptr,
        amax_ptr,
        first_row,
        first_column,
        num_rows,
        H,
        epsilon_bits,
        BLOCK,
        KIND,
        E4M3,
        LARGEST,
        OVERFLOW,
        OVERFLOW_EXPONENT,
        NATIVE,
    )


def permute_quantized(
    x: Tensor, slot_of_row: Tensor, topk: int, scale: Tensor | None, output: QuantizedOutput
) -> list[Tensor]:
    """Return what `output` defines of the rows [R, H] that the tokens x [T, H] are copied to, padding rows zero."""
    rows, columns = slot_of_row.shape[0], x.shape[1]
    destination = Destination(output, x.new_empty(1).expand(rows, columns), scale, x.dtype)
    if rows and columns:
        block_r, block_c, warps = quantized_tile(output)
        permute_quantize_kernel[(triton.cdiv(rows, block_r) * triton.cdiv(columns, block_c),)](
            x.contiguous(),
            slot_of_row,
            *destination.pointers(),
            rows,
            H=columns,
            K=topk,
            BLOCK_R=block_r,
            BLOCK_C=block_c,
            num_warps=warps,
            **destination.constants(),
        )
    return destination.tensors
