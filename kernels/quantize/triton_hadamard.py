"""The random Hadamard transform (see `hadamard`), as a device function along a tile's last axis and as a kernel, and
the amaxes that NVFP4's two copies need before they can be made, in one pass."""

# A kernel takes plain values for the constexpr parameters that choose its branches; triton's types know neither.
import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8.grouped import padded_length
from .hadamard import SIGNS, SIZE
from .triton_rounding import magnitude_bits
from .triton_tiles import grouped_tiles, store_tile, tile_of_group

TILE = 64
NEGATIVE = tl.constexpr(sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0))


@triton.jit
def _butterfly(x, H: tl.constexpr):
    """Members i and i + H of each 2 H along the last axis become their sum and their difference."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(x, (A, B // (2 * H), 2, H)), (0, 1, 3, 2)))
    pairs = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (A, B))


@triton.jit
def hadamard(x):
    """Transform groups of 16 along the last axis of a float32 tile of bfloat16 values; the result is rounded to such,
    and the sums are in the order of `hadamard._transform`."""
    member = tl.arange(0, x.shape[1]) % 16
    negative = (NEGATIVE >> member) & 1
    # scaled before the sums as in `hadamard`
    x = x * tl.where(negative == 1, -0.25, 0.25)[None, :]
    return _butterfly(_butterfly(_butterfly(_butterfly(x, 1), 2), 4), 8).to(tl.bfloat16).to(tl.float32)


@triton.jit
def random_hadamard_kernel(
    x_ptr, y_ptr, outer, x_length, y_length, inner, TRANSPOSED: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr
):
    """x: [B, outer, x_length] to [B, outer, y_length], y_length a multiple of 16; TRANSPOSED: the last two swapped."""
    program = tl.program_id(0).to(tl.int64)
    along, across = tl.cdiv(y_length, TILE_C), tl.cdiv(outer, TILE_R)
    first_column = program % along * TILE_C
    first_row = program // along % across * TILE_R
    matrix = program // along // across
    r = first_row + tl.arange(0, TILE_R)
    c = first_column + tl.arange(0, TILE_C)
    x_ptr += matrix * outer * x_length
    y_ptr += matrix * outer * y_length
    inside = (r < outer)[:, None] & (c < x_length)[None, :]
    at = r[:, None] + c[None, :] * inner if TRANSPOSED else r[:, None] * x_length + c[None, :]
    y = hadamard(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(tl.bfloat16)
    if TRANSPOSED:
        store_tile(y_ptr, y, first_row, first_column, outer, y_length, 1, inner)
    else:
        store_tile(y_ptr, y, first_row, first_column, outer, y_length, y_length, 1)


@triton.jit
def nvfp4_amax_kernel(
    x_ptr,
    row_amax_ptr,
    col_amax_ptr,
    m_splits_ptr,
    rows,
    padded_rows,
    columns,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Raise row_amax_ptr[matrix or group], float32 bits, to the largest magnitude in a tile of x: [B, R, C] or grouped
    rows [R, C], and col_amax_ptr to the amax of its transform along the rows."""
    program = tl.program_id(0).to(tl.int64)
    column_tiles = tl.cdiv(columns, TILE_C)
    first_column = (program % column_tiles * TILE_C).to(tl.int32)
    tile = program // column_tiles
    if G > 0:
        matrix, first_row, end_row, _, _ = tile_of_group(m_splits_ptr, tile, rows, padded_rows, G, G_BLOCK, TILE_R, 16)
        counts = matrix < G
    else:
        row_tiles = tl.cdiv(rows, TILE_R)
        matrix = tile // row_tiles
        first_row, end_row = tile % row_tiles * TILE_R, rows
        x_ptr += matrix * rows * columns
        counts = matrix >= 0
    r = first_row + tl.arange(0, TILE_R)
    c = first_column + tl.arange(0, TILE_C)
    inside = (r < end_row)[:, None] & (c < columns)[None, :]
    x = tl.load(x_ptr + r[:, None] * columns + c[None, :], mask=inside, other=0.0)
    row = tl.max(tl.max(magnitude_bits(x.to(tl.float32)), axis=1), axis=0)
    tl.atomic_max(row_amax_ptr + matrix, row, mask=counts, sem="relaxed")
    y = hadamard(tl.trans(x.to(tl.bfloat16).to(tl.float32)))
    col = tl.max(tl.max(magnitude_bits(y), axis=1), axis=0)
    tl.atomic_max(col_amax_ptr + matrix, col, mask=counts, sem="relaxed")


def random_hadamard(x: Tensor, dim: int) -> Tensor:
    """Return `hadamard.random_hadamard(x, dim)` of bfloat16 x [..., R, C], dim -1 or -2."""
    x = x.contiguous()
    rows, columns = x.shape[-2:]
    length, outer = (columns, rows) if dim == -1 else (rows, columns)
    rounded = triton.cdiv(length, SIZE) * SIZE
    y = x.new_empty((*x.shape[:-2], *((rows, rounded) if dim == -1 else (rounded, columns))))
    if x.numel() == 0:
        return y.zero_()
    grid = (x.shape[:-2].numel() * triton.cdiv(outer, TILE) * triton.cdiv(rounded, TILE),)
    random_hadamard_kernel[grid](x, y, outer, length, rounded, columns, TRANSPOSED=dim == -2, TILE_R=TILE, TILE_C=TILE)
    return y


def nvfp4_amaxes(x: Tensor, m_splits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the amax of each matrix of x [..., R, C], and the amax of its transform along the rows: float32 [...].

    With m_splits [G] integer: of each group of rows of x [R, C], [G].
    """
    x = x.contiguous()
    shape = x.shape[:-2] if m_splits is None else m_splits.shape
    groups = 0 if m_splits is None else m_splits.shape[0]
    row, col = (torch.zeros(shape, dtype=torch.int32, device=x.device) for _ in range(2))
    if x.numel():
        rows, columns = x.shape[-2:]
        tiles = grouped_tiles(rows, groups, SIZE, TILE) if groups else row.numel() * triton.cdiv(rows, TILE)
        nvfp4_amax_kernel[(tiles * triton.cdiv(columns, TILE),)](
            x,
            row,
            col,
            None if m_splits is None else m_splits.contiguous(),
            rows,
            padded_length(rows, groups, SIZE) if groups else rows,
            columns,
            G=groups,
            G_BLOCK=triton.next_power_of_2(max(groups, 1)),
            TILE_R=TILE,
            TILE_C=TILE,
        )
    return row.view(torch.float32), col.view(torch.float32)
