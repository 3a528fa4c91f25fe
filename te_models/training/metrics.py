"""The metrics file: JSON lines, one per step.

Numbers are written with Python's shortest exact representation, so a float read back is the float that was computed.
On resume, lines of steps after the checkpoint (and a line cut short by a kill) are dropped, so the file always tells
the story of one run.
"""

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from te_models.checkpoints.io.atomic import replace_text

from ..sizes import plural

METRICS = "metrics.jsonl"
"""The file's name in a run's folder."""

_NUMBERS = (
    *("lr", "grad_norm", "tokens", "validation_loss", "tokens_per_second", "tflops", "mfu", "data_s", "peak_memory"),
    *("max_expert_load", "seconds"),
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
)
"""What is a number, or null, wherever a row has it: what is drawn and summed up."""
_MOST_BYTES = 4 << 30
"""Of a file that is read whole: more steps than any run has."""
_LARGEST = 1e100
"""Of a number: what is computed from it stays finite."""


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


def recipe_changes(rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return (step, recipe) of each row of a run with a schedule of recipes, that follows one of another."""
    named = [(row["step"], row["recipe"]) for row in rows if "recipe" in row]
    return [now for before, now in pairwise(named) if now[1] != before[1]]


class MetricsError(ValueError):
    """A metrics file is damaged; the message names the file and the line."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a metrics file; an absent file has none.

    Raises MetricsError for a line that is no object with a `step` and a `loss`, or other things where numbers are.
    """
    return [_row(line, where) for line, where in read_lines(path)]


def read_lines(path: Path) -> Iterator[tuple[bytes, str]]:
    """Yield the complete lines of a file, each with what names it in a message; nothing where there is no file.

    What follows the last newline was cut short by a kill. Raises MetricsError for what is no file, or too large."""
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe would wait for a writer
        raise MetricsError(f"{path} is not a file")
    if path.stat().st_size > _MOST_BYTES:
        raise MetricsError(f"{path} has {plural(path.stat().st_size, 'byte')}; allowed: at most {_MOST_BYTES}")
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        yield line, f"{path}, line {number}"


def is_number(value: object) -> bool:
    """Whether a value of JSON is a number that can be computed with: finite, and no truth value."""
    return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST  # type: ignore[operator]


def is_step(value: object) -> bool:
    """Whether a value of JSON can be the number of a step."""
    return type(value) is int and 0 <= value < 1 << 53


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise MetricsError(f"{where} is damaged: {reason}; move the file away to continue without it") from None
    if not isinstance(row, dict) or not is_step(row.get("step")) or not is_number(row.get("loss")):
        raise MetricsError(f"{where} has no step and loss in numbers; move the file away to continue without it")
    sets = row.get("validation_losses", {})
    wrong = [name for name in _NUMBERS if row.get(name) is not None and not is_number(row[name])]
    if not isinstance(row.get("recipe", ""), str):
        raise MetricsError(f"{where} has a recipe that is no text; move the file away to continue without it")
    if not isinstance(sets, dict) or not all(map(is_number, sets.values())):
        wrong.append("validation_losses")
    if wrong:
        raise MetricsError(f"{where} has {wrong[0]} that is not in numbers; move the file away to continue without it")
    return row


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def finite(values: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Return the same numbers with None, JSON's null, for those that are infinite or not a number."""
    return {name: {k: v if math.isfinite(v) else None for k, v in part.items()} for name, part in values.items()}


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
