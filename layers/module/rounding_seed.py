"""Where stochastic rounding's streams begin when nobody has seeded them: where torch's generator stands.

Nothing is drawn from that generator, so the parameters that it initialises are the same with or without this.
"""

from __future__ import annotations

import ctypes
import hashlib

import torch

SEEDS = 2**42
STREAMS = 2**20  # how many layers one seed serves


def default_seed() -> int:
    """Return a number in [-SEEDS, 0) that follows from the state of torch's CPU generator alone.

    Equal states give equal numbers: again after `torch.manual_seed` with the same seed. It is negative, which seeds
    that are given never are.
    """
    state = torch.get_rng_state()
    digest = hashlib.blake2b(ctypes.string_at(state.data_ptr(), state.numel()), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEEDS - SEEDS
