"""Norm kernels, forward. A program holds whole rows in registers, so that x is read once. T rows, H columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# 32 warps of 64 float32 per thread: the most one program can hold.
MAX_COLUMNS = 65536


@triton.jit
def row_statistics(x, inside, eps, H: tl.constexpr, CENTERED: tl.constexpr):
    """Mean (0 for RMSNorm) and reciprocal deviation of each row of x [BLOCK_R, BLOCK_C]. x is 0 outside the matrix."""
    mean = tl.zeros([x.shape[0]], tl.float32)
    if CENTERED:
        mean = tl.sum(x, axis=1) / H
        x = tl.where(inside, x - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)


@triton.jit
def load_gamma(weight_ptr, columns, H: tl.constexpr, ZERO_CENTERED: tl.constexpr, WEIGHT_LAST: tl.constexpr):
    """Gamma as float32 [1, BLOCK_C]. `1 + weight` is rounded to the weight's dtype where the weight comes last."""
    gamma = tl.load(weight_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gamma += 1.0
        if WEIGHT_LAST:
            gamma = gamma.to(weight_ptr.dtype.element_ty).to(tl.float32)
    return gamma[None, :]


@triton.jit
def scale_and_round(
    x_hat,
    weight_ptr,
    bias_ptr,
    columns,
    X: tl.constexpr,
    Y: tl.constexpr,
    H: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
):
    """`gamma * x_hat + bias` in dtype Y, rounded where the reference rounds. X: dtype of the norm's input."""
    y = x_hat
    if WEIGHT_LAST:
        y = y.to(X).to(tl.float32)
    if weight_ptr is not None:
        y = load_gamma(weight_ptr, columns, H, ZERO_CENTERED, WEIGHT_LAST) * y
        if WEIGHT_LAST and weight_ptr.dtype.element_ty == X:
            y = y.to(X).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]
    return y.to(Y)


@triton.jit(do_not_specialize=["num_rows"])
def norm_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    num_rows,
    eps,
    H: tl.constexpr,
    CENTERED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_C)
    inside = (rows < num_rows)[:, None] & (columns < H)[None, :]
    at = rows[:, None] * H + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mean, rstd = row_statistics(x, inside, eps, H, CENTERED)
    if y_ptr is not None:
        x_hat = (x - mean[:, None]) * rstd[:, None]
        X: tl.constexpr = x_ptr.dtype.element_ty
        Y: tl.constexpr = y_ptr.dtype.element_ty
        y = scale_and_round(x_hat, weight_ptr, bias_ptr, columns, X, Y, H, ZERO_CENTERED, WEIGHT_LAST)
        tl.store(y_ptr + at, y, mask=inside)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    if CENTERED:
        tl.store(mean_ptr + rows, mean, mask=rows < num_rows)


def norm_tile(columns: int) -> tuple[int, int]:
    """Return (rows, columns) of a program's tile: whole rows, several of them where they are short."""
    if not 0 < columns <= MAX_COLUMNS:
        raise ValueError(f"the norm runs over {columns} columns; allowed on an accelerator: 1 to {MAX_COLUMNS}")
    # At least the columns of a block of a quantized result, so that sums have one order whatever the result is.
    block = max(128, triton.next_power_of_2(columns))
    return max(1, 2048 // block), block


def fwd_warps(elements: int) -> int:
    """Return how many warps hold a tile of this many elements."""
    return min(max(elements // 512, 4), 32)


def contiguous(*parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return weight and bias as kernels read them, element by element."""
    return tuple(None if parameter is None else parameter.contiguous() for parameter in parameters)


def norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    zero_centered: bool,
    weight_last: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise the rows of x [T, H]. Returns y [T, H] in `dtype`, mean [T] (empty unless centered), rstd [T].

    dtype None: only the statistics are wanted, and y comes back empty.
    """
    x, (weight, bias) = x.contiguous(), contiguous(weight, bias)
    rows, columns = x.shape
    y = x.new_empty(0) if dtype is None else torch.empty_like(x, dtype=dtype)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centered else rstd.new_empty(0)
    block_r, block_c = norm_tile(columns)
    if rows:
        norm_fwd_kernel[(triton.cdiv(rows, block_r),)](
            x,
            weight,
            bias,
            None if dtype is None else y,
            mean,
            rstd,
            rows,
            eps,
            H=columns,
            CENTERED=centered,
            ZERO_CENTERED=zero_centered,
            WEIGHT_LAST=weight_last,
            BLOCK_R=block_r,
            BLOCK_C=block_c,
            num_warps=fwd_warps(block_r * block_c),
            enable_fp_fusion=False,  # else it depends on the kernel which products are rounded; quantized, y is this y
        )
    return y, mean, rstd
