"""What a person at a terminal sees: tables, colour and progress of rich (extra `train`), and plain text without it.

Where output goes to a file or a pipe there are no escape codes and no progress. rich leaves colours out where NO_COLOR
is set.

A leaf module: it imports nothing of the project.
"""

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import Any, TextIO


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads a stream, on a terminal that can move its cursor."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def rich_console(stream: TextIO | None) -> Any:
    """Return rich's Console for a stream; None where that is no terminal or rich is not installed."""
    if not is_terminal(stream) or importlib.util.find_spec("rich") is None:
        return None
    return importlib.import_module("rich.console").Console(file=stream, highlight=False)


def one_line(error: BaseException) -> str:
    """Return what an error says, without line ends; its name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def say(sentence: str) -> None:
    """Print a sentence of the command on standard error."""
    print(f"te-models: {sentence}", file=sys.stderr, flush=True)


def complain(sentence: str) -> None:
    """Print a sentence of the command about what went wrong on standard error, its name in red on a terminal."""
    console = rich_console(sys.stderr)
    if console is None:
        say(sentence)
        return
    text = importlib.import_module("rich.text").Text
    console.print(text.assemble(("te-models:", "bold red"), " ", sentence), soft_wrap=True)


def say_while_waiting(sentence: str) -> None:
    """Tell a person at a terminal what the silence that follows is about; say nothing to a file or a pipe."""
    if is_terminal(sys.stderr):
        say(sentence)


@dataclass(frozen=True)
class TextTable:
    """Rows of equally many cells, the first of them a heading where `heading` is true."""

    rows: list[tuple[str, ...]]
    title: str = ""
    heading: bool = False

    def __str__(self) -> str:
        """The rows in aligned columns, below the title and indented by two spaces where there is one."""
        widths = [max(len(row[i]) for row in self.rows) for i in range(len(self.rows[0]))] if self.rows else []
        indent = "  " if self.title else ""
        lines = [indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in self.rows]
        return "\n".join(line.rstrip() for line in ([self.title] if self.title else []) + lines)

    def rich(self) -> Any:
        """The same as a table of rich, whose cells are folded where the terminal is too narrow."""
        rich_table = importlib.import_module("rich.table").Table(
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            show_header=self.heading,
            box=None,
            pad_edge=bool(self.title),
            padding=(0, 2, 0, 0) if not self.title else (0, 0, 0, 2),
        )
        text = importlib.import_module("rich.text").Text
        heading, body = (self.rows[0], self.rows[1:]) if self.heading else ((), self.rows)
        for i in range(len(self.rows[0]) if self.rows else 0):
            rich_table.add_column(heading[i] if heading else None, style="cyan" if i == 0 else None, overflow="fold")
        for row in body:
            rich_table.add_row(*map(text, row))
        return rich_table


def show(*parts: str | TextTable) -> None:
    """Print texts and tables on standard output, below one another."""
    console = rich_console(sys.stdout)
    for part in parts:
        if console is None or isinstance(part, str):
            print(part)
        else:
            console.print(part.rich())
