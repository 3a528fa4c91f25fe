"""The last step of kernels that hand out FP8: a tile of float32 results becomes the copies asked for."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8.reference import FP8_MAX
from .fp8.triton_blockwise import quantize_tile
from .output import QuantizedOutput
from .triton_rounding import float32_bits, magnitude_bits, native_fp8, to_fp8
from .triton_tiles import store_tile


@triton.jit
def store_apart(ptr, values, first_row, first_column, rows, columns):
    """Store values [R, C], C a multiple of 32, at (first_row, first_column) of a contiguous matrix [rows, columns].

    As three-dimensional values: the compiler gives loads and stores of one shape one layout, and a layout for bytes
    would change the order of the sums that a norm computes of what it loads, and with it their last bits.
    """
    RUN: tl.constexpr = 32
    R: tl.constexpr = values.shape[0]
    C: tl.constexpr = values.shape[1]
    r = (first_row + tl.arange(0, R))[:, None, None]
    c = first_column + tl.arange(0, C // RUN)[None, :, None] * RUN + tl.arange(0, RUN)[None, None, :]
    tl.store(ptr + r * columns + c, tl.reshape(values, (R, C // RUN, RUN)), mask=(r < rows) & (c < columns))


@triton.jit
def store_quantized(
    y,
    scale_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    amax_ptr,
    first_row,
    first_column,
    rows,
    columns,
    epsilon_bits,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    E4M3: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERFLOW: tl.constexpr,
    OVERFLOW_EXPONENT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store the copies of y, a float32 tile at (first_row int64, first_column) of a result [rows, columns], 0 outside.

    The tile holds whole blocks of every copy. A copy whose pointer is None is not made. BLOCK 0: one scale.
    """
    if BLOCK == 0:
        codes = to_fp8(y * tl.load(scale_ptr), E4M3, NATIVE)
        if row_ptr is not None:
            store_apart(row_ptr, codes, first_row, first_column, rows, columns)
        if col_ptr is not None:
            store_tile(col_ptr, codes, first_row, first_column, rows, columns, 1, rows)
        tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude_bits(y), axis=1), axis=0), sem="relaxed")
    else:
        blocks_across, blocks_down = tl.cdiv(columns, BLOCK), tl.cdiv(rows, BLOCK)
        if row_ptr is not None:
            codes, stored = quantize_tile(
                y, epsilon_bits, 1, BLOCK, KIND, E4M3, LARGEST, OVERFLOW, OVERFLOW_EXPONENT, NATIVE
            )
            store_apart(row_ptr, codes, first_row, first_column, rows, columns)
            store_tile(row_scale_ptr, stored, first_row, first_column // BLOCK, rows, blocks_across, blocks_across, 1)
        if col_ptr is not None:
            codes, stored = quantize_tile(
                y, epsilon_bits, BLOCK, 1, KIND, E4M3, LARGEST, OVERFLOW, OVERFLOW_EXPONENT, NATIVE
            )
            if KIND == "e8m0":
                store_tile(col_ptr, codes, first_row, first_column, rows, columns, columns, 1)
            else:
                store_tile(col_ptr, codes, first_row, first_column, rows, columns, 1, rows)
            store_tile(col_scale_ptr, stored, first_row // BLOCK, first_column, blocks_down, columns, columns, 1)


def quantized_tile(output: QuantizedOutput) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a tile that holds whole blocks of every copy."""
    if output.columnwise:
        return (128, 128, 8) if output.block == 128 else (64, 128, 4)
    return 32, 128, 4


class Destination:
    """The outputs of a kernel that ends in `store_quantized`, and the arguments for it."""

    def __init__(self, output: QuantizedOutput, y: Tensor, scale: Tensor | None, dtype: torch.dtype) -> None:
        """y: has the shape [T, H] and the device of the result; dtype: what the result is rounded to first."""
        self.tensors = [result.empty() for result in output.results(y)]
        if output.block == 0:
            self.tensors[-1].zero_()
        self.output, self.scale, self.dtype = output, scale, dtype

    def pointers(self) -> list[Tensor | None]:
        """scale_ptr to amax_ptr."""
        parts = [t.view(torch.uint8) if t.dtype == self.output.fp8_dtype else t for t in self.tensors]
        amax = parts.pop().view(torch.int32) if self.output.block == 0 else None
        per_copy = 1 if self.output.block == 0 else 2
        found: list[Tensor | None] = [self.scale]
        for wanted in (self.output.rowwise, self.output.columnwise):
            copy: list[Tensor | None] = [parts.pop(0) for _ in range(per_copy)] if wanted else []
            found += copy + [None] * (2 - len(copy))
        return [*found, amax]

    def constants(self) -> dict[str, Any]:
        """epsilon_bits to NATIVE."""
        output, largest = self.output, torch.finfo(self.dtype).max
        return {
            "epsilon_bits": float32_bits(output.epsilon),
            "BLOCK": output.block,
            "KIND": output.scale_kind,
            "E4M3": output.fp8_dtype == torch.float8_e4m3fn,
            "LARGEST": FP8_MAX[output.fp8_dtype],
            "OVERFLOW": largest,
            "OVERFLOW_EXPONENT": 126 + math.frexp(largest)[1],
            "NATIVE": native_fp8(self.tensors[0].device),
        }
