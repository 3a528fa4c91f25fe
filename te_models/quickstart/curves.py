"""The picture of the two training runs: the loss of each step, and means of several steps."""

from __future__ import annotations

import statistics
from pathlib import Path

from ..extras import require


def plot_curves(losses: dict[str, list[float]], steps: int, out: Path) -> None:
    """Write a PNG with one colour per run; a mean is of `steps` steps.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = require("matplotlib.figure", "plot", feature="the loss plot").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, values in losses.items():
        (line,) = axes.plot(range(1, len(values) + 1), values, ".-", linewidth=0.7, alpha=0.5)
        for begin in range(0, len(values), steps):
            part = values[begin : begin + steps]
            ends = (begin + 0.5, begin + len(part) + 0.5)
            name = f"{label}: steps, and means of {steps}" if begin == 0 else None
            axes.plot(ends, [statistics.fmean(part)] * 2, color=line.get_color(), linewidth=2.5, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=150)
