"""Philox on CPU in eager mode (see `eager`): the words of `random.philox`, a cache full at a time and in place.

Words are held in int64. Only those that are multiplied must be free of higher bits, so the low half of a product is
kept as the whole product, and one mask per word and round is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_AT_ONCE = 1 << 15
"""Counters worked on at a time: 256 KiB for each of their words."""


def words(
    size: int, counter: tuple[int, int, int], keys: Sequence[tuple[int, int]], multipliers: tuple[int, int]
) -> Tensor:
    """Return `size` int32 words, four of each counter (i, *counter), i = 0, 1, ...; keys: those of every round."""
    out = torch.empty((size + 3) // 4, 2, dtype=torch.int64)
    for begin in range(0, len(out), _AT_ONCE):
        c0 = torch.arange(begin, min(begin + _AT_ONCE, len(out)))
        c1, c2, c3 = (torch.full_like(c0, word) for word in counter)
        for k0, k1 in keys:
            low0, low1 = c0 * multipliers[0], c2 * multipliers[1]  # modulo 2^64
            c0, c2 = (
                (product >> 32).bitwise_xor_(word).bitwise_xor_(k).bitwise_and_(_MASK)
                for product, word, k in ((low1, c1, k0), (low0, c3, k1))
            )
            c1, c3 = low1, low0
        part = out[begin : begin + len(c0)]
        part[:, 0] = c0.bitwise_or_(c1.bitwise_left_shift_(32))
        part[:, 1] = c2.bitwise_or_(c3.bitwise_left_shift_(32))
    return out.view(torch.int32).flatten()[:size]
