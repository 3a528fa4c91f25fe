"""Pictures of training runs: the curves of one or more runs, and how far runs are from one of them (extra `plot`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from te_models.checkpoints.io.atomic import replaced_file

from ...extras import require
from ..metrics import read_metrics, recipe_changes

RAW = {"linewidth": 0.6, "alpha": 0.3}
"""How the values of single steps are drawn below their running mean."""


def span_of(steps: int) -> int:
    """Return over how many steps a curve of `steps` is averaged: a fiftieth of them, at most 100."""
    return max(1, min(100, steps // 50))


def running_mean(values: Sequence[float], span: int) -> list[float]:
    """Return the mean of the last `span` values at each place, of fewer at the first ones."""
    found, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - span] if i >= span else 0.0)
        found.append(total / min(i + 1, span))
    return found


def plot_loss(curves: dict[str, Path], out: Path) -> None:
    """Draw one or more metrics files as a PNG: the training loss of each step and its running mean, with validation
    losses where there are any, and below it the learning rate and the gradient norm; a dotted line where another recipe
    begins.

    Args:
        curves: Label of each run -> its metrics file.
    """
    figure = new_figure((8, 8))
    loss, lr, norm = figure.subplots(3, sharex=True, height_ratios=(3, 1, 1))
    for label, path in curves.items():
        rows = read_metrics(path)
        span = span_of(len(rows))
        steps = [row["step"] for row in rows]
        losses = [row["loss"] for row in rows]
        name = label if span == 1 else f"{label}, mean of {span} steps"
        (line,) = loss.plot(steps, running_mean(losses, span), label=name, linewidth=1.4)
        if span > 1:
            loss.plot(steps, losses, color=line.get_color(), **RAW)
        validation = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
        if validation:
            loss.plot(*zip(*validation), "o--", markersize=3, color=line.get_color(), label=f"{label}, validation")
        for step, recipe in recipe_changes(rows):
            for axes in (loss, lr, norm):
                axes.axvline(step, color=line.get_color(), linewidth=0.8, linestyle=":")
            place = {"xy": (step, 1), "xycoords": ("data", "axes fraction"), "xytext": (3, -3)}
            loss.annotate(recipe, **place, textcoords="offset points", va="top", color=line.get_color(), fontsize=8)
        lr.plot(steps, [row.get("lr") for row in rows], color=line.get_color(), linewidth=1.2)
        norms = [(row["step"], row["grad_norm"]) for row in rows if row.get("grad_norm") is not None]
        if norms:
            places, values = zip(*norms)
            norm.plot(places, running_mean(values, span), color=line.get_color(), linewidth=1.2)
            if span > 1:
                norm.plot(places, values, color=line.get_color(), **RAW)
                norm.set_yscale("log")
    for axes, name in ((loss, "loss (nats per token)"), (lr, "learning rate"), (norm, "gradient norm")):
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    norm.set_xlabel("step")
    loss.legend()
    save_figure(figure, out)


def plot_gaps(losses: Mapping[str, Sequence[float]], out: Path, *, span: int, title: str, reference: str) -> None:
    """Draw the losses of equally many steps of several runs, and below them each one's distance from one of the runs in
    percent, both as running means of `span` steps.

    Args:
        losses: Label of each run -> its loss in each step.
        reference: The run that the others are compared with.
    """
    figure = new_figure((7, 6))
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    means = {name: running_mean(values, span)[span - 1 :] for name, values in losses.items()}
    for name, values in means.items():
        steps = range(span, span + len(values))
        (line,) = above.plot(steps, values, label=name, linewidth=1.4)
        above.plot(range(1, len(losses[name]) + 1), losses[name], color=line.get_color(), **RAW)
        gaps = [100 * (a / b - 1) for a, b in zip(values, means[reference], strict=True)]
        below.plot(steps, gaps, color=line.get_color(), linewidth=1.4)
    above.set_title(title)
    above.set_ylabel(f"loss (line: mean of {span} steps)")
    above.legend()
    below.set_ylabel(f"% from {reference}")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    save_figure(figure, out)


def new_figure(size: tuple[float, float]) -> Any:
    """Return a figure of matplotlib of this size in inches. Raises MissingExtraError where that is not installed."""
    return require("matplotlib.figure", "plot", feature="a picture").Figure(figsize=size, layout="constrained")


def save_figure(figure: Any, out: Path) -> None:
    """Write a figure as a PNG; the file is there complete or not at all."""
    with replaced_file(out) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
