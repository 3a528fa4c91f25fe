"""Entry point: build the parser, run one verb, turn what goes wrong into an exit code and one sentence.

Exit codes: 0 done; 1 the answer is no (models differ, a check failed); 2 bad input or a missing package; 3 the work
failed (disk full, out of memory, an error of ours); 130 interrupted; 143 training ended by SIGTERM.
"""

import argparse
import contextlib
import io
import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from te_models.checkpoints.io.errors import EditedFileWarning

from .. import __version__
from ..child_process import leave_current_directory
from ..extras import MissingExtraError, UnsupportedTorchError
from ..signals import Interrupted
from ..suggestions import did_you_mean
from ..terminal import complain, one_line, say
from . import (
    adapters,
    adopt,
    certify,
    completion,
    convert,
    evaluate,
    examine,
    generate,
    info,
    models,
    quickstart,
    tokenize,
)
from .parser import Formatter, Parser, Verbs, unknown
from .training import init, launch, plan, rehearse, report, train

GROUPS: dict[str, tuple[Any, ...]] = {
    "convert": (convert, adapters, adopt),
    "inspect": (examine, certify, models, info),
    "train": (init, tokenize, rehearse, train, launch, report, plan, quickstart),
    "generate": (generate, evaluate),
    "shell": (completion,),
}
"""The headings of the help, and the modules that add the verbs under each."""

EPILOG = """\
The usual order of work:
  te-models import ./hf-model ./model
  te-models upcycle ./model ./moe --experts 4 --topk 2
  te-models train train.toml --model.path ./moe --steps 1000
  te-models export ./runs/moe/final ./hf-moe

Exit codes: 0 done; 1 the answer is no; 2 bad input; 3 the work failed; 130 interrupted;
143 training ended by SIGTERM.
"""


TAKE_KEYS = {"train": train, "launch": launch}
"""The verbs whose options are the keys of a run, too."""


def build_parser(keys: train.Keys = "none", verb: str = "train", asked: str | None = None) -> Parser:
    """Return the parser of all verbs. keys: whether `verb` has the options of a run's keys, and in its help. asked: the
    verb that is parsed, so that others need not have all options; None: any."""
    parser = Parser(
        prog="te-models",
        usage="te-models [-h] [--version] VERB ...",
        description="GPT and MoE models: convert, check, train and run them.",
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"te-models {__version__}")
    verbs: Verbs = parser.add_subparsers(
        dest="verb", metavar="VERB", required=True, help=argparse.SUPPRESS, prog="te-models"
    )
    verbs.asked, verbs.summaries, listing = asked, {}, []
    parser.verbs = verbs
    for heading, modules in GROUPS.items():
        before = len(verbs.summaries)
        for module in modules:
            own = {"keys": keys if module is TAKE_KEYS[verb] else "none"} if module in TAKE_KEYS.values() else {}
            module.add(verbs, **own)
        rows = list(verbs.summaries.items())[before:]
        listing.append(f"{heading}:\n" + "\n".join(f"  {name:<14}{summary}" for name, summary in rows))
    parser.description = "\n\n".join([parser.description or "", *listing])
    return parser


def verbs_of(parser: Parser) -> Verbs:
    """Return the action of `build_parser`'s parser that holds the verbs: `choices` has the parser of each."""
    return parser.verbs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Usage errors exit with 2, as argparse does."""
    code, debug = 0, False
    if argv is None:  # the process is the command line's
        leave_current_directory()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # a name or a text that the terminal's encoding does not have is no reason for work that is done to fail
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            args = _parse(argv)
            debug = args.debug
            with _warnings_noted(args):
                code = args.run(args)
        finally:
            _flush()
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        pass
    except BaseException as error:
        if not isinstance(error, (KeyboardInterrupt, Exception)) and not _is_panic(error):
            raise
        if debug:
            traceback.print_exc()
        code = _told(error)
    return code


@contextlib.contextmanager
def _warnings_noted(args: argparse.Namespace) -> Iterator[None]:
    """Show what te_models warns of as notes, each once, and remember it for `emit`; others' warnings as Python does."""
    args.noted, shown, ours = [], warnings.showwarning, f"{Path(__file__).parents[1]}{os.sep}"

    def show(message: Warning | str, category: type[Warning], filename: str, *where: Any, **more: Any) -> None:
        if not issubclass(category, EditedFileWarning) and not filename.startswith(ours):
            shown(message, category, filename, *where, **more)
        elif str(message) not in args.noted:
            args.noted.append(str(message))
            say(f"note: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", EditedFileWarning)
        warnings.showwarning = show
        yield


def _is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up: what it raises then is no Exception, and has no class that can be imported."""
    return type(error).__module__ == "pyo3_runtime"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if argv is None else argv
    asked = words[0] if words else ""
    parser = build_parser("hidden", asked, asked) if asked in TAKE_KEYS else build_parser(asked=asked)
    verbs = verbs_of(parser).choices
    if words and words[0].startswith("-") and words[0] not in parser._option_string_actions:
        parser.error(unknown(words[:1], "te-models", parser))
    if words and not words[0].startswith("-") and words[0] not in verbs:
        parser.error(f"{words[0]!r} is not a verb; allowed: {', '.join(verbs)}{did_you_mean(words[0], verbs)}")
    if words and words[0] in verbs:  # before what is missing: often that was misspelt
        known, options = verbs[words[0]]._option_string_actions, itertools.takewhile(lambda w: w != "--", words[1:])
        strange = [w for w in options if w.startswith("--") and w.partition("=")[0] not in known]
        if strange:
            verbs[words[0]].error(unknown(strange, words[0], verbs[words[0]]))
    args, rest = parser.parse_known_args(words)
    if rest:
        verbs[args.verb].error(unknown(rest, args.verb, verbs[args.verb]))
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
        case Interrupted():
            return _fail(error.exit_code, error.what + (f"; {error}" if str(error) else ""))
        case KeyboardInterrupt():  # a conversion says what it left for the next run
            return _fail(130, "interrupted" + (f"; {error}" if str(error) else ""))
        case OSError() if isinstance(error, _OF_INPUT):
            return _fail(2, _sentence(error))
        case ModuleNotFoundError() if error.name == "torch":
            return _fail(2, "there is no PyTorch; te_models needs PyTorch 2.11 or later, from https://pytorch.org")
        case UnsupportedTorchError():
            return _fail(2, str(error))
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
    return one_line(error)


def _fail(code: int, sentence: str) -> int:
    complain(sentence)
    return code
