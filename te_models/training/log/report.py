"""A report of training runs: one HTML file that loads nothing, with curves, results, events, environment and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from te_models.checkpoints.io.atomic import replace_text

from ...sizes import format_size, plural
from ..checkpoints.files import list_checkpoints
from ..metrics import METRICS, MetricsError, is_number, read_metrics, recipe_changes
from .curves import running_mean, span_of
from .starts import dotted_keys, read_starts
from .svg import COLORS, ChartLine, Mark, chart

MOST_EVENTS = 50
"""Of skipped steps in a list: of more there is the number."""
STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
.grid { stroke: var(--line); } .value { fill-opacity: 0; } .value:hover { fill-opacity: 1; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; }
tr { border-bottom: 1px solid var(--line); } tr.differs td { font-weight: 600; }
summary { cursor: pointer; color: var(--dim); }
.key { display: inline-block; width: .9em; height: .9em; border-radius: .2em; margin-right: .35em; }
.dim { color: var(--dim); } code { font-size: .92em; }
"""


@dataclass(frozen=True)
class RunRecord:
    """What is left of a run in its folder: the rows of its metrics, at least one, and its starts."""

    name: str
    folder: Path
    rows: list[dict[str, Any]]
    starts: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path, name: str) -> RunRecord:
        """Raises MetricsError for a folder that no run has written to, and for damaged files."""
        rows = read_metrics(folder / METRICS)
        if not rows:
            inside = next((p for p in (folder.parent, folder.parent.parent) if (p / METRICS).is_file()), None)
            what = f", which {inside} is" if inside is not None else ""
            raise MetricsError(
                f"{folder} has no {METRICS} with a step; allowed: the output_dir of a training run{what}"
            )
        return cls(name, folder, rows, read_starts(folder))

    def points(self, column: str) -> list[tuple[float, float]]:
        """Return (step, value) of each row that has a number there."""
        return [(row["step"], row[column]) for row in self.rows if row.get(column) is not None]

    def config(self) -> dict[str, Any]:
        """Return the keys of the last start by their dotted names."""
        return dotted_keys(self.starts[-1]["config"]) if self.starts else {}

    def environment(self) -> dict[str, Any]:
        """Return the environment of the last start."""
        return self.starts[-1]["environment"] if self.starts else {}

    def results(self) -> dict[str, str]:
        """Return the last numbers of the run, in words."""
        rows, last = self.rows, self.rows[-1]
        span = span_of(len(rows))
        steps = self.config().get("steps")
        losses = [row["loss"] for row in rows]
        found = {"steps": f"{last['step']} of {steps}" if steps else str(last["step"])}
        found["training loss"] = f"{running_mean(losses, span)[-1]:.4f}" + (f" (mean of {span})" if span > 1 else "")
        validation = self.points("validation_loss")
        if validation:
            best = min(validation, key=lambda point: point[1])
            found["validation loss"] = f"{validation[-1][1]:.4f} (best {best[1]:.4f} at step {best[0]})"
        for name, points in self.validation_sets().items():
            found[f"validation loss of {name}"] = f"{points[-1][1]:.4f}"
        found["tokens"] = f"{last['tokens']:,}" if last.get("tokens") is not None else ""
        speeds = sorted(value for _, value in self.points("tokens_per_second"))
        found["tokens/s, median"] = f"{speeds[len(speeds) // 2]:,.0f}" if speeds else ""
        found["peak memory"] = format_size(last["peak_memory"]) if last.get("peak_memory") is not None else ""
        found["checkpoints"] = str(len(list_checkpoints(self.folder)))
        return found

    def validation_sets(self) -> dict[str, list[tuple[float, float]]]:
        """Return (step, loss) of each set of evaluation.sets."""
        found: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            for name, value in row.get("validation_losses", {}).items():
                found.setdefault(name, []).append((row["step"], value))
        return found

    def events(self) -> list[str]:
        """Return what happened to the run, a sentence each."""
        found = []
        for start in self.starts:
            ranks = start["environment"].get("ranks", 1)
            what = f"continued from step {start['step']}" if start["step"] else "started"
            found.append(f"{start['time']}: {what} on {plural(ranks, 'rank')}")
        skipped = [str(row["step"]) for row in self.rows if row.get("skipped")]
        if skipped:
            more = f" and {len(skipped) - MOST_EVENTS} more" if len(skipped) > MOST_EVENTS else ""
            found.append(f"skipped steps: {', '.join(skipped[:MOST_EVENTS])}{more}")
        found += [f"step {step}: from here on under the recipe {recipe}" for step, recipe in recipe_changes(self.rows)]
        done, steps = self.rows[-1]["step"], self.config().get("steps")
        if steps:
            found.append("finished" if done == steps else f"not finished: step {done} of {steps} is the last one")
        return found


def write_report(folders: Sequence[Path], out: Path) -> list[RunRecord]:
    """Write the report of one or more runs, whose curves share the charts, and return what it is made of.

    Raises MetricsError as `RunRecord.read` does."""
    names = [folder.resolve().name for folder in folders]
    same = len({*names}) < len(names)
    runs = [RunRecord.read(f, str(f) if same else name) for f, name in zip(folders, names, strict=True)]
    replace_text(out, report_page(runs).encode("utf-8", "replace").decode())  # JSON has texts that UTF-8 cannot have
    return runs


def report_page(runs: Sequence[RunRecord]) -> str:
    """Return the report as HTML."""
    title = escape(", ".join(run.name for run in runs))
    legend = " ".join(
        f'<span><span class="key" style="background:{color}"></span>{escape(run.name)}</span>'
        for run, color in _colored(runs)
    )
    figures = "".join(f"<figure><figcaption>{escape(t)}</figcaption>{svg}</figure>" for t, svg in charts(runs) if svg)
    events = "".join(
        f"<h3>{escape(run.name)}</h3><ul>{''.join(f'<li>{escape(event)}</li>' for event in run.events())}</ul>"
        for run in runs
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{STYLE}</style></head><body>
<h1>{title}</h1>
<p>{legend}</p>
<h2>Results</h2>{table(runs, RunRecord.results)}
<h2>Curves</h2><div class="charts">{figures}</div>
<h2>Events</h2>{events}
<h2>Environment</h2>{table(runs, RunRecord.environment, split=True)}
<h2>Configuration</h2>{table(runs, RunRecord.config, split=True)}
</body></html>
"""


def charts(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return the heading and the SVG of each chart; "" where no run has its numbers."""
    loss: list[ChartLine] = []
    for run, color in _colored(runs):
        points = run.points("loss")
        steps, losses = zip(*points, strict=True)
        span = span_of(len(points))
        if span > 1:
            loss.append(ChartLine(points=points, color=color, kind="faint"))
        smooth = list(zip(steps, running_mean(losses, span), strict=True))
        loss.append(ChartLine(points=smooth, color=color, name=run.name))
        loss.append(
            ChartLine(points=run.points("validation_loss"), color=color, name=f"{run.name}, validation", kind="dots")
        )
    marks = [Mark(step, recipe, color) for run, color in _colored(runs) for step, recipe in recipe_changes(run.rows)]
    found = [("Loss in nats per token (dashed: validation)", chart("loss", loss, marks=marks))]
    sets = [
        ChartLine(points=points, color=color, name=f"{run.name}, {name}", kind="dots")
        for run, color in _colored(runs)
        for name, points in run.validation_sets().items()
    ]
    found.append(("Validation loss of further sets", chart("validation loss", sets)))
    if len(runs) > 1:
        found.append((f"Loss, % from {runs[0].name}", chart("% from the first run", gaps(runs))))
    for heading, column, scale in (
        ("Learning rate", "lr", 1.0),
        ("Gradient norm", "grad_norm", 1.0),
        ("Tokens per second", "tokens_per_second", 1.0),
        ("Model FLOPs utilisation in %", "mfu", 100.0),
        ("Model TFLOP/s of a process", "tflops", 1.0),
        ("Wait for data in seconds", "data_s", 1.0),
        ("Peak memory in GiB", "peak_memory", 2.0**-30),
        ("Fullest expert, times the mean", "max_expert_load", 1.0),
    ):
        lines = [
            ChartLine(points=[(x, scale * y) for x, y in run.points(column)], color=color, name=run.name)
            for run, color in _colored(runs)
        ]
        found.append((heading, chart(heading, lines)))
    return found


def gaps(runs: Sequence[RunRecord]) -> list[ChartLine]:
    """Return how far the smoothed loss of each further run is from the first one's, in percent, at common steps."""
    first, *others = [dict(run.points("loss")) for run in runs]
    lines = []
    for (run, color), losses in zip([*_colored(runs)][1:], others, strict=True):
        steps = sorted(first.keys() & losses.keys())
        span = span_of(len(steps))
        ours, theirs = (running_mean([run_losses[s] for s in steps], span) for run_losses in (losses, first))
        points = [(s, 100 * (a / b - 1)) for s, a, b in zip(steps, ours, theirs, strict=True) if b]
        points = [point for point in points if is_number(point[1])]
        lines.append(ChartLine(points=points, color=color, name=run.name))
    return lines


def table(runs: Sequence[RunRecord], values_of: Callable[[RunRecord], dict[str, Any]], *, split: bool = False) -> str:
    """Return a table with a column for each run; a row in which they differ is bold.

    split: of several runs, rows in which they differ come first, and the others, folded, after them."""
    columns = [values_of(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    if not names:
        return '<p class="dim">not recorded</p>'
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    differing, equal = [], []
    for name in names:
        cells = [_text(column.get(name)) for column in columns]
        differs = len({*cells}) > 1
        kind = ' class="differs"' if differs else ""
        row = f"<tr{kind}><td><code>{escape(name)}</code></td>{''.join(f'<td>{c}</td>' for c in cells)}</tr>"
        (differing if differs or len(runs) == 1 or not split else equal).append(row)

    def of_rows(rows: list[str]) -> str:
        return f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'

    first = of_rows(differing) if differing else "<p>The runs do not differ.</p>"
    rest = f"<details><summary>{plural(len(equal), 'equal row')}</summary>{of_rows(equal)}</details>" if equal else ""
    return first + rest


def _text(value: Any) -> str:
    return '<span class="dim">-</span>' if value is None or value == "" else escape(str(value))


def _colored(runs: Sequence[RunRecord]) -> list[tuple[RunRecord, str]]:
    return [(run, COLORS[i % len(COLORS)]) for i, run in enumerate(runs)]
