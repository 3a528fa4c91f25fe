"""What a rehearsal has measured so far: a line for each part, written when the part is finished.

A rehearsal that was killed reads its lines and measures the rest. A line that was cut short is measured again.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from te_models.checkpoints.io.atomic import replace_text

from ..config import ConfigError
from ..training.metrics import read_lines

FILE = "measured.jsonl"


class Notebook:
    """The parts of one rehearsal, by name, in a file of its folder.

    of: what the parts depend on, a JSON value. Raises ConfigError where the file is of something else, or damaged.
    """

    def __init__(self, folder: Path, of: dict[str, Any]) -> None:
        self.path, self.fresh = folder / FILE, 0
        self.parts: dict[str, Any] = {}
        lines = [json.dumps({"of": of}, sort_keys=True)]
        found = list(read_lines(self.path))
        for number, (line, where) in enumerate(found):
            try:
                row = json.loads(line)
                if number == 0:
                    before = row["of"]
                else:
                    self.parts[row["part"]] = row["value"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ConfigError(f"{where} is damaged; move the file away to measure again") from None
            if number == 0 and before != json.loads(lines[0])["of"]:
                differing = sorted(k for k in {*before, *of} if before.get(k) != json.loads(lines[0])["of"].get(k))
                raise ConfigError(
                    f"{folder} has a rehearsal with other settings ({', '.join(differing)}); choose another --output, "
                    f"or move {self.path.name} away"
                )
        lines += [line.decode() for line, _ in found[1:]]
        replace_text(self.path, "".join(f"{line}\n" for line in lines))  # without one that was cut short

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return a part's value: the one that was written, or what `measure` returns: a JSON value, written before this
        returns."""
        if name not in self.parts:
            begun = time.process_time()
            value = json.loads(json.dumps(measure(), allow_nan=False))
            row = {"part": name, "value": value, "processor_s": round(time.process_time() - begun, 2)}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self.parts[name] = value
            self.fresh += 1
        return self.parts[name]
