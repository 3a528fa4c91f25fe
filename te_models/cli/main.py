"""Entry point: build the parser, run one verb, turn what goes wrong into an exit code and one sentence.

Exit codes: 0 done; 1 the answer is no (models differ, a check failed); 2 bad input or a missing package; 3 the work
failed (disk full, out of memory, an error of ours); 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence

from ..extras import MissingExtraError
from . import convert, examine, generate, info, quickstart, train
from .parser import Formatter

GROUPS = (convert, examine, train, generate, quickstart, info)

EPILOG = """\
The usual order of work:
  te-models import ./hf-model ./model
  te-models upcycle ./model ./moe --experts 4 --topk 2
  te-models train train.toml --model.path ./moe --steps 1000
  te-models export ./runs/moe/final ./hf-moe

Exit codes: 0 done; 1 the answer is no; 2 bad input; 3 the work failed; 130 interrupted.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="te-models",
        description="GPT and MoE models: convert, check, train and run them.",
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for group in GROUPS:
        group.add(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Usage errors exit with 2, as argparse does."""
    code, debug = 0, False
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # a name or a text that the terminal's encoding does not have is no reason for work that is done to fail
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            args = _parse(argv)
            debug = args.debug
            code = args.run(args)
        finally:
            _flush()
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        pass
    except (KeyboardInterrupt, Exception) as error:
        if debug:
            traceback.print_exc()
        code = _told(error)
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if args.verb == "train":
        args.overrides = rest
    elif rest:
        parser.error(f"{args.verb} does not take {' '.join(rest)!r}; see: te-models {args.verb} --help")
    return args


def _flush() -> None:
    """Write what was printed while errors are still told: the interpreter would only complain when it ends."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it would try once more
        error.filename = "standard output"
        raise


def _told(error: BaseException) -> int:
    """Say in one sentence what went wrong and return the exit code."""
    match error:
        case KeyboardInterrupt():  # a conversion says what it left for the next run
            return _fail(130, "interrupted" + (f"; {error}" if str(error) else ""))
        case OSError() if isinstance(error, _OF_INPUT):
            return _fail(2, _sentence(error))
        case ValueError() | MissingExtraError():
            # A disk that fills up during a conversion arrives as a ValueError whose cause is the system's error.
            return _fail(3 if isinstance(error.__cause__, OSError) else 2, _sentence(error))
        case MemoryError() | OSError():
            return _fail(3, _sentence(error))
        case _:
            return _fail(3, f"{type(error).__name__}: {_sentence(error)} (--debug shows where)")


_OF_INPUT = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _fail(code: int, sentence: str) -> int:
    print(f"te-models: {sentence}", file=sys.stderr)
    return code
