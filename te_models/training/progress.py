"""What a run shows while it works: a bar on a terminal, elsewhere a line for each step, and why it is silent for long.

Everything goes to standard error.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Self

from ..terminal import rich_console, say


class Progress:
    """The progress of a run of `steps` steps, to be used in a `with`. shown: otherwise nothing is printed."""

    def __init__(self, steps: int, *, shown: bool) -> None:
        self.steps, self.shown = steps, shown
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
        numbers = rich.TextColumn("loss {task.fields[loss]}  lr {task.fields[lr]}  {task.fields[speed]} tokens/s")
        bar = (rich.TextColumn("train"), rich.BarColumn(), rich.MofNCompleteColumn(), numbers)
        self._bar = rich.Progress(*bar, rich.TimeRemainingColumn(), console=console, refresh_per_second=2)
        self._task = self._bar.add_task("train", total=self.steps, completed=step, loss="-", lr="-", speed="-")
        self._bar.start()

    def step(self, row: dict[str, Any]) -> None:
        """Show a finished step, given as its row of the metrics."""
        if not self.shown:
            return
        numbers = {"loss": f"{row['loss']:.4f}", "lr": f"{row['lr']:.2e}", "speed": f"{row['tokens_per_second']:,.0f}"}
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], **numbers)
            return
        line = f"step {row['step']}/{self.steps}  loss {numbers['loss']}  lr {numbers['lr']}"
        line += f"  {numbers['speed']} tokens/s"
        if "validation_loss" in row:
            line += f"  validation loss {row['validation_loss']:.4f}"
        print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
