"""What all verbs share: the parser and its errors, the help format, the common options, how a result is printed."""

import argparse
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..suggestions import did_you_mean
from ..terminal import TextTable, complain, show

Verbs = Any  # argparse's subparsers action (it has no public name)

_SHORTER = {
    "expected one argument": "needs a value",
    "expected at least one argument": "needs at least one value",
    "ignored explicit argument": "takes no value, and has",
    "not allowed with argument": "cannot be used with",
}
"""What argparse says of an option, and what is said instead."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that says what is wrong in one sentence, and ends with exit code 2. verbs: what has those. The
    parsed arguments have `written`, the names of those that the command line says, defaults included."""

    verbs: Verbs

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and note what was written."""
        found, rest = super().parse_known_args(args, namespace)
        said = (self._option_string_actions.get(word.partition("=")[0]) for word in args or ())
        found.written = {action.dest for action in said if action is not None} | getattr(found, "written", set())
        return found, rest

    def error(self, message: str) -> NoReturn:
        of_option = re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL)
        if of_option:
            name, what = of_option[1].rpartition("/")[2], of_option[2]
            if choice := re.fullmatch(r"invalid choice: (.+) \(choose from (.+)\)", what, re.DOTALL):
                value, allowed = choice[1], choice[2].replace("'", "")
                what = f"is {value}; allowed: {allowed}{did_you_mean(value.strip(chr(39)), allowed.split(', '))}"
            for theirs, ours in _SHORTER.items():
                what = what.replace(theirs, ours)
            joint = " " if what.startswith(("is ", *_SHORTER.values())) else ": "
            message = name + joint + what
        _, _, verb = self.prog.partition(" ")
        message = message.replace("the following arguments are required:", f"{verb or self.prog} needs")
        message = message.replace("one of the arguments", "one of").replace(" is required", " is needed")
        complain(f"{' '.join(message.split())}; see: {self.prog} --help")
        self.exit(2)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples, and wraps at the width of the terminal up to 100 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=help_width())


def help_width() -> int:
    """Columns of help: the terminal's width, up to 100."""
    return min(100, shutil.get_terminal_size().columns - 2)


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
    verbs.summaries[name] = summary
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def needs(args: argparse.Namespace, options: Iterable[str], needed: str) -> None:
    """Raise ValueError for the first of these options that was written: it does nothing without what is `needed`."""
    for option in options:
        if option in args.written:
            raise ValueError(f"--{option.replace('_', '-')} needs {needed}")


def integer(text: str) -> int:
    """The value of an option that takes a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed: an integer") from None


def positive_count(text: str) -> int:
    """The value of an option that counts something there must be one of."""
    found = integer(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"is {found}; allowed: 1 or more")
    return found


def dtype(text: str) -> str:
    """The value of an option that takes a dtype: torch's name, or one of the short ones of the field."""
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(text, text)


def number(text: str) -> float:
    """The value of an option that takes a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed: a number") from None


def positive(text: str) -> float:
    """The value of an option that takes a number above 0."""
    found = number(text)
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}; allowed: a finite number above 0")
    return found


def unknown(words: Sequence[str], verb: str, parser: argparse.ArgumentParser) -> str:
    """Return the sentence for words of the command line that a verb has no use for."""
    option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if option is not None:
        return f"{verb} has no option {option!r}{did_you_mean(option, parser._option_string_actions)}"
    switches = "; a key that is true or false is set by --KEY or --no-KEY" if words[0] in ("true", "false") else ""
    return f"{verb} does not take {words[0]!r}{switches}"


def emit(args: argparse.Namespace, result: dict[str, Any], *parts: str | TextTable) -> None:
    """Print `result` as JSON or the texts and tables, whichever the user asked for. Notes, which standard error has
    had, are a part of the JSON, behind the notes of the result."""
    noted = getattr(args, "noted", [])
    result |= {"notes": [*result.get("notes", ()), *noted]} if noted else {}
    if args.json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        show(*parts)


def read_text(file: str) -> str:
    """Return the content of a UTF-8 file; ValueError names one that is something else."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
