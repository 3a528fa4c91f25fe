"""Norms that hand out FP8. Rowwise copies alone: one pass, whole rows in registers, as the plain norm has them.

Columnwise blocks span rows, so with a columnwise copy there are two passes over x: the statistics of all rows, then
tiles. That is 6 bytes an element for both copies of bfloat16, where norm and quantization one after the other move 8.
T rows, H columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.output import QuantizedOutput
from ..quantize.triton_output import Destination, store_quantized
from ..quantize.triton_output import quantized_tile as output_tile
from .triton import contiguous, fwd_warps, norm_fwd, norm_tile, row_statistics, scale_and_round


# num_rows is specialised: transposed copies are stored 16 bytes at a time where it is a multiple of 16.
@triton.jit(do_not_specialize=["epsilon_bits"])
def norm_quantize_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    scale_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    amax_ptr,
    num_rows,
    eps,
    epsilon_bits,
    H: tl.constexpr,
    CENTERED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    Y: tl.constexpr,
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
    """WHOLE_ROWS: a tile has all columns, and the statistics are computed and stored; else they are read. Y: the dtype
    that the result is rounded to before it is quantized."""
    program, across = tl.program_id(0), tl.cdiv(H, BLOCK_C)
    first_row = (program // across).to(tl.int64) * BLOCK_R
    first_column = program % across * BLOCK_C
    rows, columns = first_row + tl.arange(0, BLOCK_R), first_column + tl.arange(0, BLOCK_C)
    inside = (rows < num_rows)[:, None] & (columns < H)[None, :]
    x = tl.load(x_ptr + rows[:, None] * H + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if WHOLE_ROWS:
        mean, rstd = row_statistics(x, inside, eps, H, CENTERED)
        tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
        if CENTERED:
            tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
    else:
        mean = tl.zeros([BLOCK_R], tl.float32)
        if CENTERED:
            mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
    x_hat = (x - mean[:, None]) * rstd[:, None]
    X: tl.constexpr = x_ptr.dtype.element_ty
    y = scale_and_round(x_hat, weight_ptr, bias_ptr, columns, X, Y, H, ZERO_CENTERED, WEIGHT_LAST).to(tl.float32)
    store_quantized(
        tl.where(inside, y, 0.0),
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


def norm_quantized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    zero_centered: bool,
    weight_last: bool,
    dtype: torch.dtype,
    scale: Tensor | None,
    output: QuantizedOutput,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return what `output` defines of the norm [T, H] of x [T, H], rounded to dtype; mean [T] (empty unless centered),
    rstd [T]."""
    x, (weight, bias) = x.contiguous(), contiguous(weight, bias)
    rows, columns = x.shape
    destination = Destination(output, x, scale, dtype)
    flags = (centered, zero_centered, weight_last)
    block_r, block_c = norm_tile(columns)
    if output.columnwise:
        _, mean, rstd = norm_fwd(x, weight, bias, eps, *flags, None)
        block_r, block_c, warps = output_tile(output)
    else:
        rstd = x.new_empty(rows, dtype=torch.float32)
        mean = torch.empty_like(rstd) if centered else rstd.new_empty(0)
        warps = fwd_warps(block_r * block_c)
    if rows:
        norm_quantize_kernel[(triton.cdiv(rows, block_r) * triton.cdiv(columns, block_c),)](
            x,
            weight,
            bias,
            mean,
            rstd,
            *destination.pointers(),
            rows,
            eps,
            H=columns,
            CENTERED=centered,
            ZERO_CENTERED=zero_centered,
            WEIGHT_LAST=weight_last,
            WHOLE_ROWS=not output.columnwise,
            Y=_TRITON_DTYPES[dtype],
            BLOCK_R=block_r,
            BLOCK_C=block_c,
            num_warps=warps,
            enable_fp_fusion=False,  # as in `norm_fwd`
            **destination.constants(),
        )
    return destination.tensors, mean, rstd


_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
