"""Entry point: build the parser, run one verb, turn what goes wrong into an exit code and one sentence.

Exit codes: 0 done; 1 the answer is no (models differ, a check failed); 2 bad input or a missing package; 3 the work
failed (disk full, out of memory, an error of ours); 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
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
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if args.verb == "train":
        args.overrides = rest
    elif rest:
        parser.error(f"{args.verb} does not take {' '.join(rest)!r}; see: te-models {args.verb} --help")
    if args.debug:
        return args.run(args)
    try:
        return args.run(args)
    except KeyboardInterrupt as interrupt:  # a conversion says what it left for the next run
        return _fail(130, "interrupted" + (f"; {interrupt}" if str(interrupt) else ""))
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (
        ValueError,
        MissingExtraError,
        FileNotFoundError,
        FileExistsError,
        NotADirectoryError,
        PermissionError,
    ) as error:
        # A disk that fills up during a conversion arrives as a ValueError whose cause is the system's error.
        return _fail(3 if isinstance(error.__cause__, OSError) else 2, _sentence(error))
    except (MemoryError, OSError) as error:
        return _fail(3, _sentence(error))
    except Exception as error:
        return _fail(3, f"{type(error).__name__}: {_sentence(error)} (--debug shows where)")


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _fail(code: int, sentence: str) -> int:
    print(f"te-models: {sentence}", file=sys.stderr)
    return code
