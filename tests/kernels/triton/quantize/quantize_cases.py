"""Cases and comparison of the quantization kernels: against the reference, which emulation tests hold to NUMERICS."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.layers import emulation

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# More than one tile of 128 x 128 in either direction, ragged; a batch; one element; nothing.
SHAPES = [(1, 1), (33, 130), (2, 31, 20), (140, 1), (0, 128), (3, 0)]
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1000]
BLOCKS = [
    *(((1, 128), "pow2"), ((1, 128), "float32"), ((128, 128), "pow2"), ((128, 128), "float32"), ((1, 32), "e8m0")),
    ((32, 32), "e8m0"),
]
# rows per group, all rows: empty groups, rows past the last group, no rows at all
SPLITS = [([5, 0, 130], 135), ([5, 0, 30], 40), ([0, 0], 20), ([64], 64), ([0, 0, 0], 0)]


def hard(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Ordinary values mixed with zeros, subnormals, ties and maxima."""
    size = torch.Size(shape).numel()
    return emulation.hard_values(max(size, 1), seed)[:size].view(shape).to(dtype)


def ordinary(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values within a few powers of two of each other, lest an outlier's scale hides others; zeros of both signs."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
    return torch.where(torch.rand(shape, generator=generator) < 0.05, x * 0, x).to(dtype)


def signed_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of both signs, whole blocks of them, and one value in fifty."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.98, x * 0, x).to(dtype)


def special(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A matrix with a NaN, infinities, a huge outlier, a block of zeros, one of equal values, one of subnormals."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[:32, :32], x[:32, 32:64] = 0.0, 5.0
    x[32:64, :32] = 2.0**-130
    x[40, 50], x[50, 90], x[3, 100], x[70, 1] = float("nan"), float("inf"), -float("inf"), 3e38
    return x.to(dtype)


def assert_bitwise(got: Tensor, expected: Tensor) -> None:
    """Compare bits; a NaN may have any payload."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    got, expected = got.cpu(), expected.cpu()
    if got.dtype.is_floating_point:
        nan = got.float().isnan()
        torch.testing.assert_close(nan, expected.float().isnan(), rtol=0, atol=0)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
        got, expected = got.contiguous().view(bits), expected.contiguous().view(bits)
        got, expected = got.masked_fill(nan, 0), expected.masked_fill(nan, 0)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def assert_all(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """`assert_bitwise`, tensor by tensor."""
    for one, other in zip(got, expected, strict=True):
        assert_bitwise(one, other)
