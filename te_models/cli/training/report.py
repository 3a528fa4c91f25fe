"""`te-models report`: training runs as one HTML file."""

import argparse
from pathlib import Path

from ..parser import Verbs, emit, verb

DESCRIPTION = """\
Write the report of a training run, one HTML file that needs no network: curves of loss, learning
rate, gradient norm, speed and memory, validation results, events (starts, skipped steps),
environment and configuration. Several runs share the charts, and stand side by side in tables.
A run that still works can be looked at, too."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "report",
        run,
        "training runs as one HTML file",
        DESCRIPTION,
        "te-models report runs/bf16 runs/mxfp8 --output comparison.html",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the output_dir of a training run")
    parser.add_argument("--output", metavar="FILE", help="the file to write (report.html in the first RUN)")


def run(args: argparse.Namespace) -> int:
    """Write the report and print where it is."""
    from ...training.log.report import write_report

    folders = [Path(folder) for folder in args.runs]
    out = folders[0] / "report.html" if args.output is None else Path(args.output)
    if out.is_dir():
        raise ValueError(f"--output is {out}, a folder; allowed: a file")
    runs = write_report(folders, out)
    result = {"report": str(out), "runs": {run.name: run.results() for run in runs}}
    emit(args, result, f"{out}: {', '.join(run.name for run in runs)}")
    return 0
