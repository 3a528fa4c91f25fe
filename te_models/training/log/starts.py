"""Every start of a run in its folder: when, from which step, with which configuration, versions and machine."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ..config import TrainConfig
from ..metrics import MetricsError

STARTS = "starts.jsonl"
"""The file's name in a run's folder: a line for each start."""


def record_start(output_dir: Path, config: TrainConfig, step: int, device: str, ranks: int) -> None:
    """Append a start of the run; called by rank 0. step: how many steps have finished; ranks: of the whole run."""
    accelerator = torch.cuda.get_device_name() if device == "cuda" else None
    environment = {
        "te_models": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": accelerator or f"cpu ({platform.machine()}, {os.cpu_count()} cores)",
        "threads": torch.get_num_threads(),
        "ranks": ranks,
    }
    time = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"step": step, "time": time, "environment": environment, "config": config.to_dict()})
    with (output_dir / STARTS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_starts(output_dir: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, each with step, time, environment and config; none where the file is absent.

    Raises MetricsError for a line that is something else."""
    path = output_dir / STARTS
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else (), 1):
        try:
            start = json.loads(line)
            found.append({name: start[name] for name in ("step", "time", "environment", "config")})
        except (ValueError, KeyError, TypeError) as error:
            raise MetricsError(f"{path}, line {number} is no start of a run: {error}") from None
    return found


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the keys of nested tables by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
