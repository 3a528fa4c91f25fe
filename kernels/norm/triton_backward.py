"""Norm kernels, backward. T rows, H columns, P programs.

The gradients of weight and bias are sums over rows in two stages: each program adds up its own stretch of rows, then
the P partial sums are added. Both orders are fixed by shapes and device, so two runs agree to the last bit; with atomic
additions they would not.

A program holds whole rows in registers, so that x and dy are read once, up to HELD_COLUMNS. A multiprocessor's 65,536
registers hold four numbers of each of 16,384 columns, and x, dy, gamma and the sums for the gradients are five, so
longer rows would spill to memory what is loaded. They are read twice: first the sums over each row, then the gradients
of a stretch of rows and a part of the columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import multiprocessors
from .triton import contiguous, load_gamma, norm_tile

HELD_COLUMNS = 8192
"""Columns of rows that a program holds."""

_SUM_COLUMNS, _PART_COLUMNS = 4096, 1024
"""Columns that a program of longer rows works on at a time: for the sums over rows, for the gradients."""


@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def norm_bwd_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    d_weight_ptr,
    d_bias_ptr,
    num_rows,
    rows_per_program,
    H: tl.constexpr,
    CENTERED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    begin = program * rows_per_program
    columns = tl.arange(0, BLOCK_C)
    if weight_ptr is not None:
        gamma = load_gamma(weight_ptr, columns, H, ZERO_CENTERED, WEIGHT_LAST)
    if d_weight_ptr is not None:
        d_weight = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    if d_bias_ptr is not None:
        d_bias = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for step in range(0, rows_per_program, BLOCK_R):
        rows = begin + step + tl.arange(0, BLOCK_R)
        row_inside = (rows < num_rows) & (rows < begin + rows_per_program)
        inside = row_inside[:, None] & (columns < H)[None, :]
        at = rows[:, None] * H + columns[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_inside, other=0.0)[:, None]
        if CENTERED:
            x = tl.where(inside, x - tl.load(mean_ptr + rows, mask=row_inside, other=0.0)[:, None], 0.0)
        x_hat = x * rstd
        if d_weight_ptr is not None:
            factor = x_hat
            if WEIGHT_LAST:
                factor = factor.to(x_ptr.dtype.element_ty).to(tl.float32)
            d_weight += dy * factor
        if d_bias_ptr is not None:
            d_bias += dy
        if weight_ptr is not None:
            dy = dy * gamma
        dx = dy - x_hat * (tl.sum(dy * x_hat, axis=1) / H)[:, None]
        if CENTERED:
            dx -= (tl.sum(dy, axis=1) / H)[:, None]
        tl.store(dx_ptr + at, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    if d_weight_ptr is not None:
        tl.store(d_weight_ptr + program * H + columns, tl.sum(d_weight, axis=0), mask=columns < H)
    if d_bias_ptr is not None:
        tl.store(d_bias_ptr + program * H + columns, tl.sum(d_bias, axis=0), mask=columns < H)


@triton.jit
def norm_bwd_sums_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    H: tl.constexpr,
    CENTERED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """sums[row] = (mean of gamma * dy * x_hat, mean of gamma * dy), the second where the norm is centered."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if CENTERED:
        mean = tl.load(mean_ptr + row)
    with_x_hat = tl.zeros([BLOCK_C], tl.float32)
    alone = tl.zeros([BLOCK_C], tl.float32)
    for begin in range(0, H, BLOCK_C):
        columns = begin + tl.arange(0, BLOCK_C)
        inside = columns < H
        x = tl.load(x_ptr + row * H + columns, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * H + columns, mask=inside, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            dy *= tl.reshape(load_gamma(weight_ptr, columns, H, ZERO_CENTERED, WEIGHT_LAST), [BLOCK_C])
        with_x_hat += dy * ((x - mean) * rstd)
        alone += dy
    tl.store(sums_ptr + 2 * row, tl.sum(with_x_hat, axis=0) / H)
    if CENTERED:
        tl.store(sums_ptr + 2 * row + 1, tl.sum(alone, axis=0) / H)


@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def norm_bwd_part_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    dx_ptr,
    d_weight_ptr,
    d_bias_ptr,
    num_rows,
    rows_per_program,
    H: tl.constexpr,
    CENTERED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WEIGHT_LAST: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The gradients of a stretch of rows in BLOCK_C columns, from `norm_bwd_sums_kernel`'s sums."""
    program = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < H
    if weight_ptr is not None:
        gamma = tl.reshape(load_gamma(weight_ptr, columns, H, ZERO_CENTERED, WEIGHT_LAST), [BLOCK_C])
    d_weight = tl.zeros([BLOCK_C], tl.float32)
    d_bias = tl.zeros([BLOCK_C], tl.float32)
    begin = program * rows_per_program
    for row in range(begin, tl.minimum(begin + rows_per_program, num_rows)):
        at = row * H + columns
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if CENTERED:
            x -= tl.load(mean_ptr + row)
        x_hat = x * rstd
        factor = x_hat
        if WEIGHT_LAST:
            factor = factor.to(x_ptr.dtype.element_ty).to(tl.float32)
        d_weight += dy * factor
        d_bias += dy
        if weight_ptr is not None:
            dy *= gamma
        dx = dy - x_hat * tl.load(sums_ptr + 2 * row)
        if CENTERED:
            dx -= tl.load(sums_ptr + 2 * row + 1)
        tl.store(dx_ptr + at, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    if d_weight_ptr is not None:
        tl.store(d_weight_ptr + program * H + columns, d_weight, mask=inside)
    if d_bias_ptr is not None:
        tl.store(d_bias_ptr + program * H + columns, d_bias, mask=inside)


@triton.jit
def column_sum_kernel(partial_ptr, out_ptr, num_rows, H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for begin in range(0, num_rows, BLOCK_R):
        rows = begin + tl.arange(0, BLOCK_R)
        inside = (rows < num_rows)[:, None] & (columns < H)[None, :]
        total += tl.load(partial_ptr + rows[:, None] * H + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=columns < H)


def norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
    zero_centered: bool,
    weight_last: bool,
    weight_grad: torch.dtype | None,
    bias_grad: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x [T, H], weight [H] and bias [H] (those empty where their dtype is None)."""
    dy, x, (weight,) = dy.contiguous(), x.contiguous(), contiguous(weight)
    rows, columns = x.shape
    dx = torch.empty_like(x)
    held = columns <= HELD_COLUMNS
    block_r, block_c = norm_tile(columns) if held else (1, _PART_COLUMNS)
    # Two programs share a multiprocessor, so that one loads while the other reduces.
    programs = max(1, min(triton.cdiv(rows, block_r), 2 * multiprocessors(x.device)))
    per_program = triton.cdiv(triton.cdiv(rows, programs), block_r) * block_r
    partial = [None if grad is None else rstd.new_empty(programs, columns) for grad in (weight_grad, bias_grad)]
    flags = {"H": columns, "CENTERED": centered, "ZERO_CENTERED": zero_centered, "WEIGHT_LAST": weight_last}
    inputs = (dy, x, weight, mean, rstd)
    if held:
        warps = min(max(block_r * block_c // 256, 4), 32)
        norm_bwd_kernel[(programs,)](
            *inputs, dx, *partial, rows, per_program, **flags, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps
        )
    else:
        sums = rstd.new_empty(rows, 2)
        if rows:
            norm_bwd_sums_kernel[(rows,)](*inputs, sums, **flags, BLOCK_C=_SUM_COLUMNS, num_warps=8)
        norm_bwd_part_kernel[(triton.cdiv(columns, block_c), programs)](
            *inputs, sums, dx, *partial, rows, per_program, **flags, BLOCK_C=block_c, num_warps=4
        )
    d_weight, d_bias = (
        x.new_empty(0) if part is None or grad is None else _column_sum(part, grad)
        for part, grad in zip(partial, (weight_grad, bias_grad), strict=True)
    )
    return dx, d_weight, d_bias


def _column_sum(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up the rows of partial [P, H] float32 in a fixed order."""
    rows, columns = partial.shape
    out = partial.new_empty(columns, dtype=dtype)
    column_sum_kernel[(triton.cdiv(columns, 32),)](partial, out, rows, H=columns, BLOCK_R=64, BLOCK_C=32)
    return out
