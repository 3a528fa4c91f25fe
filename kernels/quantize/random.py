"""Random bits for stochastic rounding: Philox4x32-10, a counter-based generator.

Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). Nothing is drawn from a state: the
bits of an element are a function of (key, stream, element index), the same on every device and in every order, so a run
can be repeated and resumed. On CPU in eager mode the words are made a cache full at a time and in place.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .eager import eager_on_cpu
from .fp8.blocks import once_per_block

_MASK = 0xFFFFFFFF
_AT_ONCE = 1 << 15
"""Counters worked on at a time: 256 KiB for each of their words."""


def words(
    size: int, counter: tuple[int, int, int], keys: Sequence[tuple[int, int]], multipliers: tuple[int, int]
) -> Tensor:
    """Return `size` int32 words, four of each counter (i, *counter), i = 0, 1, ...; keys: the keys of every round."""
    out = torch.empty((size + 3) // 4, 2, dtype=torch.int64, device="cpu")
    for begin in range(0, len(out), _AT_ONCE):
        c0 = torch.arange(begin, min(begin + _AT_ONCE, len(out)), device="cpu")
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


_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _multiply(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and low words of a * multiplier, for words held in int64.

    Both multipliers are above 2^31; with multiplier - 2^32 the product fits a signed 64-bit integer, and the missing
    a * 2^32 is added to the high word.
    """
    product = a * (multiplier - 2**32)
    return ((product >> 32) + a) & _MASK, product & _MASK


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of 32 random bits per counter. counter: 4, key: 2 broadcastable int64 tensors of words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(key: Tensor, stream: int, shape: Sequence[int]) -> Tensor:
    """Return 32 uniform bits per element, int32, of the given shape (up to 2^34 elements).

    key: int64 [2], (seed, counter). stream: 0..2^32-1, for independent draws under one key. Element i (row-major) is
    word i % 4 of Philox with key = the seed's low and high words, counter = (i // 4, stream, the counter's low word,
    its high word).
    """
    size = math.prod(shape)
    if eager_on_cpu(key):
        seed, step = key.tolist()
        low, high = seed & _MASK, (seed >> 32) & _MASK
        keys = [((low + i * _KEY_STEPS[0]) & _MASK, (high + i * _KEY_STEPS[1]) & _MASK) for i in range(_ROUNDS)]
        return words(size, (stream, step & _MASK, (step >> 32) & _MASK), keys, _MULTIPLIERS).view(shape)
    seed, step = key[0], key[1]
    # a buffer: Inductor's C++ backend multiplies an inlined arange by a constant in 32 bits (torch 2.13)
    block = once_per_block(torch.arange((size + 3) // 4, dtype=torch.int64, device=key.device))
    counter = (block, torch.full_like(step, stream), step & _MASK, (step >> 32) & _MASK)
    drawn = torch.stack(philox(counter, (seed & _MASK, (seed >> 32) & _MASK)), -1)
    signed = (drawn ^ 0x80000000) - 0x80000000
    return signed.to(torch.int32).flatten()[:size].view(shape)


def unit_interval(bits: Tensor) -> Tensor:
    """Return the upper 24 of 32 bits as a float32 in [0, 1)."""
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24
