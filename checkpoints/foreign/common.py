"""What Megatron-Core stores beside the tensors of a distributed checkpoint: `common.pt`, read without unpickling."""

import os
from pathlib import Path
from typing import Any

from ..io.errors import CheckpointError
from .legacy import KNOWN
from .torch_file import open_torch_file

COMMON = "common.pt"


def read_common(folder: Path) -> dict[str, Any]:
    """Return the values, with records in place of objects; none where there is no such file."""
    if not (folder / COMMON).exists():
        return {}
    fd, file = open_torch_file(folder / COMMON, COMMON, KNOWN)
    os.close(fd)
    if not isinstance(file.value, dict):
        raise CheckpointError(f"{folder.name}/{COMMON} holds no values by name")
    return file.value


def counted_steps(folder: Path) -> int | None:
    """Return how many steps a run of Megatron's has done: what its optimizer counted, or else its iterations."""
    values = read_common(folder)
    held = values.get("optimizer")
    held = held.get("optimizer", held) if isinstance(held, dict) else {}
    groups = held.get("param_groups") if isinstance(held, dict) else None
    steps = {group.get("step") for group in groups if isinstance(group, dict)} if isinstance(groups, list) else set()
    found = steps.pop() if len(steps) == 1 else values.get("iteration")
    return found if type(found) is int and found > 0 else values.get("iteration") or None
