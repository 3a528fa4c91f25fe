"""What all verbs share: the help format, the common options, how a result is printed."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Verbs = Any  # argparse's subparsers action, which has no public name


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples, and wraps at the width of the terminal up to 100 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(100, shutil.get_terminal_size().columns - 2))


def verb(
    verbs: Verbs, name: str, run: Callable[[argparse.Namespace], int], summary: str, description: str, example: str
) -> argparse.ArgumentParser:
    """Add a verb with the options that every verb has; `run` gets the parsed arguments and returns the exit code."""
    parser = verbs.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def emit(args: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """Print `result` as JSON or `text`, whichever the user asked for."""
    print(json.dumps(result, indent=2, allow_nan=False) if args.json else text)


def read_text(file: str) -> str:
    """Return the content of a UTF-8 file; ValueError names one that is something else."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def table(rows: list[tuple[str, ...]], indent: str = "") -> str:
    """Align `rows` in columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((indent + line).rstrip() for line in lines)
