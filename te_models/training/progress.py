"""What a run shows while it works: a bar on a terminal, elsewhere a line for each step, and why it is silent for long.

Everything goes to standard error.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from ..sizes import format_size
from ..terminal import rich_console, say

STEPS_OF_ETA = 100
"""The time that is left is estimated from at most so many of the last steps."""


class Progress:
    """The progress of a run of `steps` steps, to be used in a `with`. shown: otherwise nothing is printed."""

    def __init__(self, steps: int, *, shown: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds since any moment."""
        self.steps, self.shown, self._clock = steps, shown, clock
        self._ended: deque[tuple[int, float]] = deque(maxlen=STEPS_OF_ETA + 1)
        self._bar: Any = None
        self._task: Any = None

    def waiting(self, sentence: str) -> None:
        """Say what happens now, before it takes long."""
        if self.shown:
            say(sentence)

    def begin(self, step: int) -> None:
        """Begin to show steps; `step` of them are finished."""
        console = rich_console(sys.stderr) if self.shown else None
        if console is None:
            return
        rich = importlib.import_module("rich.progress")
        texts = (rich.TextColumn("{task.fields[eta]}"), rich.TextColumn("{task.fields[numbers]}"))
        bar = (rich.TextColumn("train"), rich.BarColumn(), rich.MofNCompleteColumn(), *texts)
        self._bar = rich.Progress(*bar, console=console, refresh_per_second=2)
        self._task = self._bar.add_task("train", total=self.steps, completed=step, eta="", numbers="")
        self._bar.start()

    def step(self, row: dict[str, Any]) -> None:
        """Show a finished step, given as its row of the metrics."""
        if not self.shown:
            return
        self._ended.append((row["step"], self._clock()))
        numbers, eta = numbers_of(row), self._eta()
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], eta=eta, numbers="  ".join(numbers))
            return
        words = [f"step {row['step']}/{self.steps}", *numbers, *([eta] if eta else [])]
        print("  ".join(words), file=sys.stderr, flush=True)

    def _eta(self) -> str:
        """Return the time that the remaining steps take, at the pace of the last ones. The first step of a command,
        which compiles, is left out: the clock starts at its end."""
        (first, begun), (last, now) = self._ended[0], self._ended[-1]
        if last == first:
            return ""
        return f"eta {clock_time((self.steps - last) * (now - begun) / (last - first))}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def numbers_of(row: dict[str, Any]) -> list[str]:
    """Return what a row of the metrics says to a person, each with its name or unit."""
    found = [f"loss {row['loss']:.4f}"]
    if "validation_loss" in row:
        found.append(f"validation loss {row['validation_loss']:.4f}")
    found.append(f"lr {row['lr']:.2e}")
    norm = row["grad_norm"]
    found.append("grad norm not finite" if norm is None else f"grad norm {norm:.3g}")
    found.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    found.append(f"mfu {row['mfu']:.1%}" if "mfu" in row else f"{row['tflops']:.3g} TFLOP/s")
    found.append(f"data wait {row['data_s']:.2g} s")
    return [*found, format_size(row["peak_memory"]), *(["skipped"] if row.get("skipped") else [])]


def clock_time(seconds: float) -> str:
    """Return seconds as "1:05", "2:01:05" or "3d 2:01:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    short = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    return f"{days}d {short}" if days else short
