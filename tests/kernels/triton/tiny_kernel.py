"""The smallest kernel, which shows that the interpreter runs."""

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
