"""Every start of a run in its folder: when, from which step, with which configuration, versions and machine."""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...sizes import plural
from ..config import TrainConfig
from ..metrics import MetricsError, is_step, read_lines

STARTS = "starts.jsonl"
"""The file's name in a run's folder: a line for each start."""
_DEEPEST = 20
"""Of the tables of a configuration, in one another."""


def record_start(output_dir: Path, config: TrainConfig, step: int, device: str, ranks: int) -> None:
    """Append a start of the run; called by rank 0. step: how many steps have finished; ranks: of the whole run."""
    accelerator = torch.cuda.get_device_name() if device == "cuda" else None
    environment = {
        "te_models": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": accelerator or f"cpu ({platform.machine()}, {plural(os.cpu_count() or 1, 'core')})",
        "threads": torch.get_num_threads(),
        "ranks": ranks,
    }
    time = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"step": step, "time": time, "environment": environment, "config": config.to_dict()})
    with (output_dir / STARTS).open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # a line that a kill cut short
        file.write(line.encode() + b"\n")


def read_starts(output_dir: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, each with step, time, environment and config; none where the file is absent.

    Raises MetricsError for a line that is something else."""
    found = []
    for line, where in read_lines(output_dir / STARTS):
        try:
            start = json.loads(line.decode("utf-8"))
            found.append({name: start[name] for name in ("step", "time", "environment", "config")})
        except RecursionError:
            raise MetricsError(f"{where} is no start of a run: it is nested too deeply") from None
        except (ValueError, KeyError, TypeError) as error:
            raise MetricsError(f"{where} is no start of a run: {error}") from None
        if what := _wrong(found[-1]):
            raise MetricsError(f"{where} is no start of a run: {what}")
    return found


def dotted_keys(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the keys of nested tables by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= dotted_keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _wrong(start: dict[str, Any]) -> str | None:
    """Return what is wrong with the values of a start."""
    environment = start["environment"]
    if not is_step(start["step"]) or not isinstance(start["time"], str):
        return "its step is not a number, or its time not a text"
    if not isinstance(environment, dict) or not isinstance(start["config"], dict):
        return "its environment or its config is not an object"
    if not is_step(environment.get("ranks", 1)):
        return "its environment has a number of ranks that is not one"
    inner: list[Any] = [environment, start["config"]]
    for _ in range(_DEEPEST):
        inner = [v for table in inner for v in (table.values() if isinstance(table, dict) else table)]
        inner = [v for v in inner if isinstance(v, dict | list)]
    return "it is nested too deeply" if inner else None
