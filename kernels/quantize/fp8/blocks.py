"""Blocks of a matrix: their largest magnitudes, how a value per block reaches the block's elements, and statistics.

A block is (rows, columns) of the last two dimensions; leading dimensions are a batch. Ragged edges are padded with
zeros for amax only. Shapes: x [..., R, C], block (br, bc), one value per block [..., ceil(R / br), ceil(C / bc)].
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...torch_versions import splits_loops
from ..eager import eager_on_cpu


def once_per_block(values: Tensor) -> Tensor:
    """Return `values`, computed once per block and not again for each of the block's elements.

    Inductor inlines cheap element-wise producers into their consumers, here a division or a dozen integer operations
    into a loop over every element (measured on CPU: 31 ms against 4 ms for 32x1 blocks of 1024 x 4096). It never
    inlines through a strided view of a buffer.
    """
    if not torch.compiler.is_compiling():
        return values
    size = values.size()
    # For one row under dynamic=True the tracer knows the sizes as numbers, but cannot return `stride()` (2.11 to 2.15).
    stride = [math.prod(size[i + 1 :]) for i in range(len(size))] if values.is_contiguous() else values.stride()
    return torch.as_strided(values, size, stride)


def to_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return [..., R, C] as [..., ceil(R/br), br, ceil(C/bc), bc], ragged edges padded with zeros."""
    (rows, columns), (br, bc) = x.shape[-2:], block
    if not (statically_known_true(rows % br == 0) and statically_known_true(columns % bc == 0)):
        x = F.pad(x, (0, -columns % bc, 0, -rows % br))
    return x.unflatten(-1, (-1, bc)).unflatten(-3, (-1, br))


def grid(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Return how many blocks cover a matrix, down and across."""
    return -(-rows // block[0]), -(-columns // block[1])


def per_element(values: Tensor, block: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Repeat each block's value over its elements: [..., ceil(R/br), ceil(C/bc)] -> [..., R, C]."""
    return repeat(repeat(values, -2, block[0], rows), -1, block[1], columns)


def times_blocks(x: Tensor, values: Tensor, block: tuple[int, int]) -> Tensor:
    """Return x: [..., R, C] in float32, every block multiplied by its value."""
    rows, columns = x.shape[-2:]
    if eager_on_cpu(x) and rows % block[0] == 0 and columns % block[1] == 0:
        # values are broadcast, not written out; the compiler does that anyway, and best in two dimensions
        product = x.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        to_blocks(product, block).mul_(values[..., :, None, :, None])
        return product
    return x.float() * per_element(values, block, rows, columns)


def repeat(values: Tensor, dim: int, times: int, length: int) -> Tensor:
    """Repeat every entry along `dim`, cut off at `length`."""
    if times == 1:
        return values
    if statically_known_true(length % times == 0) and not splits_loops(values.device):
        axis = values.dim() + dim
        sizes = (*values.shape[: axis + 1], times, *values.shape[axis + 1 :])
        return values.unsqueeze(axis + 1).expand(sizes).flatten(axis, axis + 1)
    # A ragged edge looks its value up. By a shift, for a power of two: where Inductor's C++ backend sees a division of
    # the loop variable it splits the loop by the divisor and drops the columns past the last whole block (torch 2.13).
    assert times & (times - 1) == 0, "blocks have powers of two"
    return values.index_select(dim, torch.arange(length, device=values.device) >> (times.bit_length() - 1))


def _magnitudes(x: Tensor) -> Tensor | None:
    """Return the bits of |x| as integers. They are ordered like the numbers, NaN above all; None where x is not
    computed with eagerly on CPU, or has another dtype."""
    mask = {2: 0x7FFF, 4: 0x7FFFFFFF}.get(x.dtype.itemsize)
    if mask is None or not x.dtype.is_floating_point or not eager_on_cpu(x):
        return None
    return x.detach().view(torch.int16 if mask == 0x7FFF else torch.int32) & mask


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each matrix, float32: [..., R, C] -> [...]. NaN stays; an empty one has 0."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-2], dtype=torch.float32)
    found = _magnitudes(x)
    if found is not None:
        return found.amax((-2, -1)).view(x.dtype).float()
    return x.abs().amax((-2, -1)).float()


def row_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row, float32: [..., R, C] -> [..., R, 1]. NaN stays; an empty one has 0."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32)
    return x.abs().amax(-1, keepdim=True).float()


def blockwise_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each block, float32; NaN wherever a block holds one."""
    found = blockwise_magnitudes(x, block)
    if found is not None:
        return found.view(x.dtype).float()
    # Across each row, then down: two short loops are faster than one over both (128x128 on CPU: 0.8 against 1.1 ms).
    magnitude = to_blocks(x.float(), block).abs()
    across = magnitude.amax(-1) if block[1] > 1 else magnitude.squeeze(-1)
    return across.amax(-2) if block[0] > 1 else across.squeeze(-2)


def blockwise_magnitudes(x: Tensor, block: tuple[int, int]) -> Tensor | None:
    """Return the bits of each block's largest magnitude as integers of x's width; None as `_magnitudes` does."""
    found = _magnitudes(x)
    return None if found is None else largest_of_blocks(found, block)


def largest_of_blocks(magnitudes: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest of each block of integers [..., R, C], eagerly.

    Down first, many columns at a time. A reduction of rows is fast where a row fills vectors: 32 numbers do as int32
    (0.14 ns a number), not as int16 (0.43), and 64 as int16, too. Of fewer, halves first.
    """
    magnitudes = to_blocks(magnitudes, block)
    magnitudes = magnitudes.amax(-3) if block[0] > 1 else magnitudes.squeeze(-3)
    width, dtype = magnitudes.shape[-1], magnitudes.dtype
    if width == 32:
        return magnitudes.int().amax(-1).to(dtype)
    if width == 16:
        magnitudes = torch.maximum(*magnitudes.chunk(2, -1))
    return magnitudes.amax(-1) if width > 1 else magnitudes.squeeze(-1)


_ROUNDING = 1 + 2.0**-20
"""A block's own amax times its scale may come out just above the largest value; that is no saturation."""


def block_statistics(
    x: Tensor,
    values: Tensor,
    scale_inv: Tensor,
    block: tuple[int, int] | None,
    largest: float,
    count: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return {"amax", "scale_min", "scale_max", "underflow", "saturation"}.

    x: [..., R, C]; values: its float32 decoded form; scale_inv: float32 per block, [..., ceil(R/br), ceil(C/bc)], or
    per matrix, [...], where block is None; largest: the format's maximum; count: how many of the elements are not mere
    padding by zeros, None: all. scale_min and scale_max are over what is multiplied with before the cast, blocks of
    zeros left out (both 1 where nothing is left). underflow: the fraction of nonzero elements that became zero;
    saturation: the fraction that were clamped, infinities included. amax is infinite or NaN where x holds that.
    """
    x = x.detach()
    matrix_amax, one = amax(x), torch.ones((), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return {"amax": one * 0, "scale_min": one, "scale_max": one, "underflow": one * 0, "saturation": one * 0}
    scale = torch.div(torch.ones_like(scale_inv), scale_inv).clamp(max=torch.finfo(torch.float32).max)
    if block is None:
        per_block, spread = matrix_amax, scale[..., None, None]
    else:
        per_block, spread = blockwise_amax(x, block), per_element(scale, block, *x.shape[-2:])
    magnitude = x.abs().float()
    used, nonzero = per_block > 0, magnitude > 0
    clamped = (magnitude * spread > largest * _ROUNDING).float()
    smallest = torch.where(used, scale, float("inf")).amin()
    return {
        "amax": matrix_amax.amax(),
        "scale_min": torch.where(used.any(), smallest, one),
        "scale_max": torch.where(used.any(), torch.where(used, scale, 0.0).amax(), one),
        "underflow": (nonzero & (values == 0)).float().sum() / nonzero.float().sum().clamp(min=1.0),
        "saturation": clamped.mean() if count is None else clamped.sum() / count.clamp(min=1),
    }
