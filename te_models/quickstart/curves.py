"""The picture of the two training runs: the loss of each step, and the mean of each reading of the same batches."""

from __future__ import annotations

import statistics
from pathlib import Path

from ..extras import require


def plot_curves(losses: dict[str, list[float]], epoch: int, out: Path) -> None:
    """Write a PNG with one colour per run; `epoch` is the number of steps in one reading of the batches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = require("matplotlib.figure", "plot", feature="the loss plot").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, values in losses.items():
        (line,) = axes.plot(range(1, len(values) + 1), values, ".-", linewidth=0.7, alpha=0.5)
        for begin in range(0, len(values), epoch):
            part = values[begin : begin + epoch]
            ends = (begin + 0.5, begin + len(part) + 0.5)
            name = f"{label}: steps, and mean of each epoch" if begin == 0 else None
            axes.plot(ends, [statistics.fmean(part)] * 2, color=line.get_color(), linewidth=2.5, label=name)
    axes.set_xlabel(f"step ({epoch} batches in an epoch)")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=150)
