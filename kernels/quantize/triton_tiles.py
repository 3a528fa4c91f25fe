"""Which tile of the input a program works on: sizes to choose among, and the tiles of grouped rows."""

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl
from triton import knobs

# The first holds every block. A tile of 32 to 128 elements per thread has enough loads in flight for the memory of a
# Hopper GPU with several programs per multiprocessor; which is best depends on the copies made, so it is measured.
_TILES = [(128, 128, 8), (128, 64, 4), (64, 128, 4), (32, 128, 4), (32, 64, 1)]


def autotuned(kernel: Any, fits: Callable[[dict[str, Any], int, int], bool], key: Sequence[str]) -> Any:
    """Let the first call with new values of `key` measure the tiles that fit; the interpreter takes the largest.

    kernel: takes TILE_R and TILE_C. fits(arguments, tile_r, tile_c): whether such a tile holds whole blocks.
    """
    configs = [triton.Config({"TILE_R": r, "TILE_C": c}, num_warps=warps) for r, c, warps in _TILES]

    def prune(configs: list[triton.Config], named: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
        arguments = named | kwargs
        return [c for c in configs if fits(arguments, c.kwargs["TILE_R"], c.kwargs["TILE_C"])]

    if knobs.runtime.interpret:
        configs = configs[:1]
    return triton.autotune(configs, key=list(key), prune_configs_by={"early_config_prune": prune})(kernel)


def size_class(elements: int) -> int:
    """Return a coarse measure of size: what was measured on a tiny tensor is not used for large ones."""
    return min(elements.bit_length() // 4, 6)


@triton.jit
def store_tile(ptr, values, first_row, first_column, end_row, end_column, stride_r, stride_c):
    """Store values [R, C] at (first_row, first_column), the part before (end_row, end_column)."""
    rows = first_row + tl.arange(0, values.shape[0])
    columns = first_column + tl.arange(0, values.shape[1])
    inside = (rows < end_row)[:, None] & (columns < end_column)[None, :]
    at = rows.to(tl.int64)[:, None] * stride_r + columns.to(tl.int64)[None, :] * stride_c
    tl.store(ptr + at, values, mask=inside)


@triton.jit
def tile_of_group(
    m_splits_ptr, tile, rows, padded_rows, G: tl.constexpr, G_BLOCK: tl.constexpr, TILE_R: tl.constexpr, A: tl.constexpr
):
    """Locate tile number `tile` of grouped rows, whose groups are cut into tiles one by one.

    Returns the group, the tile's first row and the end of the group's rows, and the same two in rows padded to A (see
    `grouped`). The tiles after the last group's have group G and cover what is left of both.
    """
    groups = tl.arange(0, G_BLOCK)
    splits = tl.load(m_splits_ptr + groups, mask=groups < G, other=0).to(tl.int64)
    tiles, sizes = tl.cdiv(splits, TILE_R), tl.cdiv(splits, A) * A
    group = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (groups < G)).to(tl.int32), axis=0)
    before = groups < group
    within = (tile - tl.sum(tl.where(before, tiles, 0), axis=0)) * TILE_R
    begin = tl.sum(tl.where(before, splits, 0), axis=0)
    slot = tl.sum(tl.where(before, sizes, 0), axis=0)
    last = group == G
    end = tl.where(last, rows, tl.minimum(begin + tl.sum(tl.where(groups == group, splits, 0), axis=0), rows))
    end_slot = slot + tl.sum(tl.where(groups == group, sizes, 0), axis=0)
    end_slot = tl.where(last, padded_rows, tl.minimum(end_slot, padded_rows))
    # what the compiler cannot see and wide stores need; tiles hold a multiple of A rows
    return group, begin + within, end, tl.multiple_of(slot + within, A), tl.multiple_of(end_slot, A)


def grouped_tiles(rows: int, groups: int, align: int, tile: int) -> int:
    """Return how many tiles grouped rows can need: every group, and what is left, wastes less than one."""
    return (rows + groups * (align - 1) + (groups + 1) * (tile - 1)) // tile
