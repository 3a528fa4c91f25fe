"""The smallest kernels, which show that the interpreter runs, and casts as a GPU does."""

import torch
import triton
import triton.language as tl


@triton.jit
def _double_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def double(x: torch.Tensor) -> torch.Tensor:
    """Return 2 x."""
    y = torch.empty_like(x)
    _double_kernel[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), 16)
    return y


@triton.jit
def _cast_kernel(x, y, n, steps, BLOCK: tl.constexpr):
    for step in range(steps):
        i = step * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(x + i, mask=i < n).to(y.dtype.element_ty), mask=i < n)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in `dtype`."""
    y = torch.empty_like(x, dtype=dtype)
    _cast_kernel[(1,)](x, y, x.numel(), triton.cdiv(x.numel(), 1024), 1024)
    return y
