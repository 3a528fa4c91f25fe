"""What a run shows while it works: a bar on a terminal, elsewhere lines, and why it is silent for long.

Step, loss and the time left come first, what fits into the width of a terminal after them.

Everything goes to standard error.
"""

import importlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from ..sizes import format_size
from ..terminal import rich_console, say

_BAR = 12
"""Columns of the bar."""
_LONG_S = 0.01
"""Seconds of waiting for data that a person wants to know of."""
STEPS_OF_ETA = 100
"""The time that is left is estimated from at most this many of the last steps."""


class Progress:
    """The progress of a run of `steps` steps, to be used in a `with`. shown: otherwise nothing is printed. every: steps
    between two lines where there is no terminal."""

    def __init__(
        self, steps: int, *, shown: bool, every: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """clock: seconds since any moment."""
        self.steps, self.shown, self._every, self._clock = steps, shown, every, clock
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
        numbers, rest = (rich.TextColumn(f"{{task.fields[{name}]}}") for name in ("numbers", "rest"))
        bar = rich.BarColumn(bar_width=_BAR)
        self._bar = rich.Progress(rich.MofNCompleteColumn(), numbers, bar, rest, console=console, refresh_per_second=2)
        self._task = self._bar.add_task("train", total=self.steps, completed=step, numbers="", rest="")
        self._width = console.width
        self._bar.start()

    def step(self, row: dict[str, Any]) -> None:
        """Show a finished step, given as its row of the metrics."""
        if not self.shown:
            return
        self._ended.append((row["step"], self._clock()))
        eta = self._eta()
        first = [f"loss {row['loss']:.4f}", *([eta] if eta else [])]
        count, validation = f"{row['step']}/{self.steps}", validation_of(row)
        if self._bar is not None:
            room = self._width - len(f"{self.steps}/{self.steps}  {'  '.join(first)}  ") - _BAR
            rest = fitting_words(row_numbers(row), room)
            self._bar.update(self._task, completed=row["step"], numbers="  ".join(first), rest="  ".join(rest))
            if validation:
                self._bar.console.print(f"step {count}  {validation}", highlight=False)
            return
        if row["step"] % self._every == 0 or row["step"] == self.steps or validation:
            print("  ".join([f"step {count}", *first, *row_numbers(row)]), file=sys.stderr, flush=True)
        if validation:
            print(f"step {count}  {validation}", file=sys.stderr, flush=True)

    def _eta(self) -> str:
        """Return the time that the remaining steps take, at the pace of the last ones. The first step of a command is
        left out because it compiles: the clock starts at its end."""
        (first, begun), (last, now) = self._ended[0], self._ended[-1]
        if last == first:
            return ""
        return f"eta {clock_time((self.steps - last) * (now - begun) / (last - first))}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def row_numbers(row: dict[str, Any]) -> list[str]:
    """Return what a row of the metrics says to a person beside its losses, each with its name or unit, what matters
    most first."""
    found = ["skipped"] if row.get("skipped") else []
    if "rewards/margins" in row:
        found.append(f"margin {row['rewards/margins']:.3g} ({row['rewards/accuracies']:.0%} right)")
    found.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    norm = row["grad_norm"]
    found.append("grad norm not finite" if norm is None else f"grad norm {norm:.3g}")
    found.append(f"lr {row['lr']:.2e}")
    found.append(format_size(row["peak_memory"]))
    found.append(f"mfu {row['mfu']:.1%}" if "mfu" in row else f"{row['tflops']:.3g} TFLOP/s")
    return [*found, *([f"data wait {row['data_s']:.2f} s"] if row["data_s"] >= _LONG_S else [])]


def validation_of(row: dict[str, Any]) -> str:
    """Return the validation losses of a row, each with the name of its set; "" without any."""
    found = [f"validation loss {row['validation_loss']:.4f}"] if "validation_loss" in row else []
    return "  ".join(found + [f"{name} {value:.4f}" for name, value in row.get("validation_losses", {}).items()])


def fitting_words(words: list[str], room: int) -> list[str]:
    """Return the first of these words that fit in so many columns, two between neighbours."""
    ends = itertools.accumulate(len(word) + 2 for word in words)
    return [word for word, end in zip(words, ends, strict=True) if end - 2 <= room]


def clock_time(seconds: float) -> str:
    """Return seconds as "1:05", "2:01:05" or "3d 2:01:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    short = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    return f"{days}d {short}" if days else short
