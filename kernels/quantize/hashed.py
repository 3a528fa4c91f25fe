"""Random bits for rounding what is stored, not computed with (optimizer moments): a hash of 32-bit words.

Philox (`random`) is the generator of the recipes and costs about fifty multiplications an element. A moment needs 16
bits with the right mean that differ from the bits of the step before. This costs four operations on 32-bit integers,
the widest that vector units multiply. The bits of an element are a function of (seed, stream, step, the element's
index): the same on every device, in every order and in pieces of any size.

The mixer multiplies by odd constants and folds high bits into low ones; its shifts and constants are "lowbias32" of
Chris Wellons' search for 32-bit mixers with the least bias ("Prospecting for Hash Functions", nullprogram.com, 2018).
It is a bijection, so the bits of one step are 2^32 different words: nearly uniform, and not for cryptography.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .fp8.blocks import once_per_block

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_INCREMENT = 0x9E3779B9  # 2^32 divided by the golden ratio: tells equal words in a row apart


def _signed(word: int) -> int:
    """Return the int32 of the same bits."""
    word &= _MASK
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix_word(x: int) -> int:
    for shift, multiplier in zip((16, 15), _MULTIPLIERS, strict=True):
        x = (x ^ (x >> shift)) * multiplier & _MASK
    return x ^ (x >> 16)


def _mix(x: Tensor) -> Tensor:
    """Do what `_mix_word` does to int32 elements, whose products wrap around and whose shifts copy the sign."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(_MULTIPLIERS[0])
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(_MULTIPLIERS[1])
    return x ^ ((x >> 16) & 0xFFFF)


def hash_key(seed: int, stream: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the int32 [2] that `hashed_bits` takes. seed: 64 bits, stream: 32 bits, for independent draws."""
    state = 0
    for word in (seed, seed >> 32, stream):
        state = _mix_word((state + _INCREMENT ^ word) & _MASK)
    words = (state, _mix_word((state + _INCREMENT) & _MASK))
    # filled on the device: for a list from the host it would make the host wait
    return torch.stack([torch.full((), _signed(word), dtype=torch.int32, device=device) for word in words])


def hash_words(key: Tensor, step: Tensor) -> Tensor:
    """Return the two words of a step that `hashed_bits` mixes an index with, int32 [2]."""
    return _mix(key ^ step)


def hashed_bits(key: Tensor, step: Tensor, begin: Tensor, shape: Sequence[int]) -> Tensor:
    """Return 32 uniform bits per element, int32, of the given shape.

    key: of `hash_key`. step, begin: int32 scalars; element i (row-major) has index begin + i, of which 32 bits count.
    With (k0, k1) = mix(key ^ step), the bits at index i are mix(mix(i ^ k0) + k1): the second word between two rounds
    keeps two steps from being one sequence in another order.
    """
    words = once_per_block(hash_words(key, step))
    index = torch.arange(math.prod(shape), dtype=torch.int32, device=key.device) + begin
    return _mix(_mix(index ^ words[0]) + words[1]).view(shape)
