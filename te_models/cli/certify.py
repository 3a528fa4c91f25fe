"""`te-models certify`: whether and how exactly a checkpoint converts, before it is downloaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sizes import format_size
from ..terminal import TextTable, say_while_waiting
from .parser import Verbs, emit, needs, positive_count, verb

if TYPE_CHECKING:
    from ..certify import Certificate

DESCRIPTION = """\
Read the configuration, the index and the headers of a checkpoint, a few MB of any size, and say
whether te_models converts it: the first field of the configuration that is not understood, the
first tensor that does not fit, what becomes of quantized numbers, and what an import and its uses
take. SOURCE is a Hugging Face folder, its URL on a web server, or a hub id. Exit code 0: exact;
3: convertible with loss; 2: not."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "certify",
        run,
        "whether a checkpoint converts exactly, before its download",
        DESCRIPTION,
        "te-models certify Qwen/Qwen3-30B-A3B --card certificate.md",
    )
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="a folder, a URL, or a hub id")
    parser.add_argument("--scales", action="store_true", help="read the scales of quantized weights, too")
    parser.add_argument("--ranks", type=positive_count, metavar="N", help="try the layouts of N ranks for training")
    parser.add_argument("--card", metavar="FILE", help="write the certificate as Markdown")
    parser.add_argument("--check", metavar="FILE", help="certify again what a card is of, and compare; 1: it differs")


def layouts(found: Certificate, ranks: int) -> tuple[list[dict[str, Any]], TextTable]:
    """Return the plans of training a certified model in bfloat16 in the layouts that ranks allow."""
    from ..plan import Hardware, plan_layouts
    from .training.plan import layouts_table, usual_run

    config = usual_run({"config": found.config}, found.config["max_position_embeddings"])
    say_while_waiting("running a micro-batch of each layout on tensors without values")
    plans = plan_layouts(config, ranks, Hardware())
    return [plan.to_dict() for plan in plans], layouts_table(plans, ranks, Hardware())


def run(args: argparse.Namespace) -> int:
    """Print the certificate; its verdict is the exit code."""
    from ..certify import certify
    from ..certify.card import check_card, text, write_card

    if (args.source is None) == (args.check is None):
        raise ValueError("certify needs SOURCE, or --check FILE in place of it")
    if args.check is not None:
        needs(args, ("ranks", "card"), "SOURCE")
        found, differs = check_card(Path(args.check), scales=args.scales)
        said = "; ".join(differs) or f"{args.check} still holds: {found.verdict}"
        emit(args, found.to_dict() | {"differs": differs}, said)
        return 1 if differs else 0
    say_while_waiting("reading the headers of the weight files")
    found = certify(args.source, scales=args.scales)
    result = found.to_dict()
    parts: list[str | TextTable] = ["\n".join(text(found))]
    if found.classes:
        rows = [("tensors", "count", "source", "target", "numbers")]
        rows += [tuple(str(row[k]) for k in ("tensors", "count", "source", "target", "kind")) for row in found.classes]
        parts.append(TextTable(rows, "numbers", heading=True))
    if args.ranks is not None and found.config:
        plans, table = layouts(found, args.ranks)
        result["layouts"] = plans
        parts.append(table)
    if found.memory:
        parts.append(
            TextTable([(use, format_size(n)) for use, n in found.memory.items()], "memory, without activations")
        )
    parts += [f"note: {note}" for note in found.notes]
    if args.card is not None:
        write_card(found, Path(args.card))
        parts.append(f"wrote {args.card}")
    emit(args, result, *parts)
    return found.exit_code
