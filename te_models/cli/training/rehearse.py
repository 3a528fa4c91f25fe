"""`te-models rehearse`: which recipe for this model and data, before a GPU is rented."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...signals import Interrupted, StopSignals
from ...terminal import TextTable, say_while_waiting
from ..parser import Verbs, emit, positive_count, verb
from ..progress import part_progress

if TYPE_CHECKING:
    from ...rehearse import Rehearsal

DESCRIPTION = """\
Measure, on this machine, what each recipe does to the model and the data of a training run: the
errors of every GEMM's operands, the KL to high precision of each layer, the loss after short runs
over several seeds. Then choose the cheapest formats by layer whose loss gap to bf16 is below
--budget, verify them by running them, and write precision.toml (the table [precision] with its
evidence), rehearsal.html and rehearsal.json. What is measured stays: the same command goes on
where one that was ended stopped."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "rehearse",
        run,
        "which recipe for a run: measured on this machine",
        DESCRIPTION,
        "te-models rehearse run.toml --budget 0.5% --formats mxfp8 nvfp4",
    )
    parser.add_argument("config", metavar="RUN.toml", help="the training configuration")
    parser.add_argument("--output", metavar="DIR", help="folder of the results (output_dir with -rehearsal behind it)")
    parser.add_argument(
        "--budget", type=_percent, default=0.5, metavar="P%", help="largest loss gap to bf16 in percent (0.5%%)"
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        metavar="NAME",
        help="formats to choose from: those that the GPU has (delayed current block mxfp8 nvfp4); nvfp4-nearest and "
        "others name options of a recipe",
    )
    parser.add_argument(
        "--layers",
        type=positive_count,
        metavar="N",
        help="measure N layers one by one, as the first, middle and last (all)",
    )
    parser.add_argument("--steps", type=positive_count, default=10, metavar="N", help="steps of each short run (10)")
    parser.add_argument(
        "--seeds", type=positive_count, default=3, metavar="N", help="seeds of each short run, 3 or more (3)"
    )
    parser.add_argument("--tokens", type=positive_count, default=512, metavar="N", help="tokens of a batch (512)")
    parser.add_argument(
        "--no-variants", action="store_true", help="do not measure the errors of the recipes' other options"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not check the weights of the model")


def run(args: argparse.Namespace) -> int:
    """Rehearse, and say what is recommended; 1 where no recipe stays within the budget."""
    from ...training.config.file import read_config
    from ...training.config.overrides import Override

    unverified = [Override("model.verify", "--no-verify", False, ("--no-verify",))] if args.no_verify else []
    config = read_config(Path(args.config), unverified)
    say_while_waiting("loading torch")
    try:
        with StopSignals():
            from ...rehearse import RehearsalOptions, rehearse

            named = {} if args.formats is None else {"formats": tuple(args.formats)}
            options = RehearsalOptions(
                budget=args.budget,
                layers=args.layers,
                steps=args.steps,
                seeds=args.seeds,
                tokens=args.tokens,
                variants=not args.no_variants,
                **named,
            )
            out = Path(f"{config.output_dir}-rehearsal" if args.output is None else args.output)
            with part_progress("rehearsal") as report:
                found = rehearse(config, options, out, report)
    except Interrupted as stop:
        raise Interrupted(stop.signum, "what is measured stays; the same command goes on there") from None
    files = {name: str(out / f) for name, f in _FILES.items()}
    emit(args, {**found.to_dict(), **files}, _table(found), *found.evidence(), f"{out}: {', '.join(_FILES.values())}")
    return 0 if found.precision.recipe != "none" else 1


_FILES = {"table": "precision.toml", "page": "rehearsal.html", "data": "rehearsal.json"}


def _table(found: Rehearsal) -> TextTable:
    rows = [("assignment", "GEMM time", "predicted gap", "measured gap", "95 % interval")]
    for one in found.tried:
        measured = f"{one.measured.low:+.3f} to {one.measured.high:+.3f}"
        rows.append(
            (one.name, f"{one.cost:.3f}", f"{one.predicted.mean:+.3f} %", f"{one.measured.mean:+.3f} %", measured)
        )
    return TextTable(rows, "loss gap to bf16", heading=True)


def _percent(text: str) -> float:
    try:
        return float(text.removesuffix("%"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed: a percentage such as 0.5%") from None
