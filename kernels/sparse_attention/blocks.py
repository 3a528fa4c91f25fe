"""A block of queries after the other, so that scores of all queries never exist: their sizes, and what they see.

B batch, S queries, L keys, C queries of a block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..chunks import wide

SCORES = 2**21
"""How many scores of all heads a block has about: 8 MB of float32, as much as the caches of a few cores hold."""
FEWEST = 16
"""The fewest queries of a block, so that its products stay matrices."""


class Block(NamedTuple):
    """Queries `begin` to `end` of row `row`; they see keys below `keys` at most."""

    row: int
    begin: int
    end: int
    keys: int


def query_blocks(queries: Tensor, keys: int, heads: int) -> Iterator[Block]:
    """Yield the blocks of queries [B, S, ...], the last of `keys` keys, whose scores are of `heads` heads."""
    rows, length = queries.shape[:2]
    size = max(FEWEST, SCORES // max(1, heads * keys))
    for row in range(rows):
        for begin in range(0, length, size):
            end = min(length, begin + size)
            yield Block(row, begin, end, keys - length + end)


def hidden_of(block: Block, hidden: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return which keys a block's queries do not see, bool [C, block.keys]: those behind them, and what is hidden:
    bool [B or 1, 1 or S, L], or the numbers of documents [B, L], negative for padding, of which each sees its own."""
    at = torch.arange(block.keys, device=device)
    found = at > torch.arange(block.begin, block.end, device=device)[:, None] + (keys - queries)
    if hidden is None:
        return found
    own = hidden[min(block.row, hidden.shape[0] - 1)]
    if hidden.dtype == torch.bool:
        rows = own if own.shape[0] == 1 else own[block.begin : block.end]
        return found | rows[:, : block.keys]
    number = own[keys - queries :][block.begin : block.end, None]
    return found | (own[: block.keys] != number) | (number < 0)


def chosen_of(block: Block, choice: Tensor) -> Tensor:
    """Return which keys a block's queries chose, bool [C, block.keys]. choice: integers [B, S, K]; a negative one
    stands for no key."""
    places = choice[block.row, block.begin : block.end].long()
    places = torch.where(places < 0, block.keys, places)
    found = places.new_zeros(places.shape[0], block.keys + 1, dtype=torch.bool)
    return found.scatter_(1, places, True)[:, : block.keys]


def operand(x: Tensor) -> Tensor:
    """Return what products are computed of: on a CPU, low precision as float32."""
    return x.float() if x.device.type == "cpu" and x.dtype != torch.float64 else x


def widened(x: Tensor) -> Tensor:
    """Return x in float32, or float64."""
    return x.to(wide(x))
