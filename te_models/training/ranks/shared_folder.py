"""Whether all ranks see the folder of their run: asked at its start, since only a checkpoint would tell later."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import torch

from ...config import ConfigError
from ..one_run import LOCK
from .data_parallel import Ranks, gather_tensors

_PATIENCE = 10.0
"""Seconds that a rank looks for a file which the first one has made."""


def check_shared(output_dir: Path, ranks: Ranks) -> None:
    """Check that every rank sees the folder in which the first one holds the lock; called by all.

    Raises ConfigError, on every rank, that names the first rank which has another folder of that name, or none: found
    now, and not when the first checkpoint has been trained for."""
    if ranks.world_size == 1:
        return
    note = _note(output_dir) if ranks.is_main else b""
    deadline = time.monotonic() + (0.0 if ranks.is_main else _PATIENCE)
    expected = gather_tensors({"note": _digest(note)}, ranks)["0.note"]
    while not torch.equal(_digest(note), expected) and time.monotonic() < deadline:
        time.sleep(0.1)  # a network file system may not show a new file at once
        note = _note(output_dir)
    found = gather_tensors({"note": _digest(note)}, ranks)
    for rank in range(ranks.world_size):
        if not torch.equal(found[f"{rank}.note"], expected):
            raise ConfigError(
                f"output_dir is {output_dir}, and rank {rank} does not see what rank 0 writes there; allowed: a folder "
                "that all ranks share"
            )


def _note(output_dir: Path) -> bytes:
    try:
        return (output_dir / LOCK).read_bytes()
    except OSError:
        return b""


def _digest(note: bytes) -> torch.Tensor:
    return torch.tensor(list(hashlib.sha256(note).digest()), dtype=torch.uint8, device="cpu")
