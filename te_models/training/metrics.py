"""The metrics file: JSON lines, one per step.

Numbers are written with Python's shortest exact representation, so a float read back is the float that was computed.
On resume, lines of steps after the checkpoint (and a line cut short by a kill) are dropped, so the file always tells
the story of one run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Self

from te_models.checkpoints.io.atomic import replace_text

METRICS = "metrics.jsonl"
"""The file's name in a run's folder."""


class MetricsFile:
    """Append-only metrics, to be used in a `with`. `keep_steps`: how many steps the run that continues has finished."""

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        self.path = path
        earlier = [row for row in read_metrics(path) if row["step"] <= keep_steps]
        replace_text(path, "".join(_line(row) for row in earlier))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it reaches the file before this returns."""
        self._file.write(_line(row))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class MetricsError(ValueError):
    """A metrics file is damaged; the message names the file and the line."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a metrics file; an absent file has none.

    Raises MetricsError for a line that is no object with a `step` and a `loss`.
    """
    if not path.exists():
        return []
    if not path.is_file():  # reading a pipe would wait for a writer
        raise MetricsError(f"{path} is not a file")
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut short
    return [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise MetricsError(f"{where} is damaged: {error}; move the file away to continue without it") from None
    numbers = isinstance(row, dict) and type(row.get("step")) is int and type(row.get("loss")) in (int, float)
    if not numbers or not math.isfinite(row["loss"]):
        raise MetricsError(f"{where} has no step and loss in numbers; move the file away to continue without it")
    return row


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def finite(values: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Return the same numbers with None, JSON's null, for those that are infinite or not a number."""
    return {name: {k: v if math.isfinite(v) else None for k, v in part.items()} for name, part in values.items()}


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
