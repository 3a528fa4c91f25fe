"""Seeds and random states.

Each step starts from a seed derived from (run seed, step, rank), so randomness never depends on what ran before it; the
states of the generators are saved with a checkpoint all the same, as bytes in uint8 tensors, and restored on resume, so
that code between steps that draws random numbers continues as well.
"""

import hashlib
import json
import random
import struct
from typing import Any

import torch

from te_models.layers.quantizer.state import SEEDS

PYTHON_STATE = struct.Struct("<I625I?d")
"""`random.getstate()`: version, the Mersenne twister's numbers and index, the spare Gaussian if there is one."""


def derive_seed(seed: int, *labels: str | int) -> int:
    """Return a 63-bit seed for a named purpose; distinct label sequences give independent seeds."""
    digest = hashlib.sha256(json.dumps([seed, *labels]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def rounding_seed(seed: int, rank: int) -> int:
    """Return the seed of stochastic rounding of a rank, one that `set_rounding_seed` takes."""
    return (derive_seed(seed, "rounding", rank) >> 20) % SEEDS


def seed_all(seed: int) -> None:
    """Seed Python's and torch's generators (all devices)."""
    random.seed(seed)
    torch.manual_seed(seed)


def random_state() -> dict[str, torch.Tensor]:
    """Return the generators' states as uint8 tensors: `python`, `torch` and, with an accelerator, `cuda`.

    Their sizes are constant, so that ranks can exchange them.
    """
    version, numbers, gauss = random.getstate()
    python = bytearray(PYTHON_STATE.pack(version, *numbers, gauss is not None, gauss or 0.0))
    states = {"python": torch.frombuffer(python, dtype=torch.uint8), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: dict[str, torch.Tensor]) -> None:
    """Undo `random_state`."""
    random.setstate(python_state(states["python"]))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def python_state(state: torch.Tensor) -> tuple[Any, ...]:
    """Return the state of Python's generator, as `random.setstate` takes it, from its bytes: uint8, of PYTHON_STATE."""
    version, *numbers, has_gauss, gauss = PYTHON_STATE.unpack(bytes(state.tolist()))
    return version, tuple(numbers), gauss if has_gauss else None
