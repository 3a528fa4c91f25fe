"""What Megatron-Core stores beside the tensors of a distributed checkpoint: `common.pt`, read without unpickling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..io.errors import CheckpointError
from ..io.weight_files import plain_file
from .legacy import KNOWN
from .torch_file import TorchFile

COMMON = "common.pt"


def read_common(folder: Path) -> dict[str, Any]:
    """Return the values, with records in place of objects; none where there is no such file."""
    if not (folder / COMMON).exists():
        return {}
    file = plain_file(folder, COMMON)
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        value = TorchFile(fd, 0, file.stat().st_size, COMMON, KNOWN).value
    finally:
        os.close(fd)
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder.name}/{COMMON} holds no values by name")
    return value


def counted_steps(folder: Path) -> int | None:
    """Return how many steps a run of Megatron's has done: what its optimizer counted, or else its iterations."""
    values = read_common(folder)
    held = values.get("optimizer")
    held = held.get("optimizer", held) if isinstance(held, dict) else {}
    groups = held.get("param_groups") if isinstance(held, dict) else None
    steps = {group.get("step") for group in groups if isinstance(group, dict)} if isinstance(groups, list) else set()
    found = steps.pop() if len(steps) == 1 else values.get("iteration")
    return found if type(found) is int and found > 0 else values.get("iteration") or None
