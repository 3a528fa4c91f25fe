"""`te-models models`: published models by name, and what each of them takes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..sizes import format_size, plural
from ..terminal import TextTable
from .parser import Verbs, emit, verb

if TYPE_CHECKING:
    from ..catalogue import Listed

DESCRIPTION = """\
List the models of the catalogue: published models whose configuration te_models knows by name.
PATTERN is a part of a name, hub id or family, or has * and ?. Memory is that of weights and of
what trains them, without activations and caches. Where one model is left, all formats are listed.
The names also work in `plan --model`, `init --model`, `toy`, and as `name` of a run's [model]."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "models",
        run,
        "published models by name: sizes, and memory to serve and to train",
        DESCRIPTION,
        "te-models models qwen3",
    )
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="a part of a name, or a pattern with * and ?")


def run(args: argparse.Namespace) -> int:
    """Print the models."""
    from ..catalogue import matching, model_listing

    found = [model_listing(entry) for entry in matching(args.pattern)]
    emit(args, {"models": [one.to_dict() for one in found]}, *_parts(found))
    return 0


def _parts(found: list[Listed]) -> list[str | TextTable]:
    if len(found) == 1:
        return _details(found[0])
    rows: list[tuple[str, ...]] = [
        ("name", "family", "parameters", "active", "context", "serve bf16", "nvfp4", "LoRA bf16", "train bf16")
    ]
    for one in found:
        sizes = (one.serve["bf16"], one.serve["nvfp4"], one.fine_tune["bf16"], one.train["bf16"])
        active = "" if one.active_parameters == one.parameters else _count(one.active_parameters)
        context = "" if one.entry.context is None else f"{one.entry.context:,}"
        words = (one.entry.name, one.entry.hf["model_type"], _count(one.parameters), active, context)
        rows.append((*words, *map(format_size, sizes)))
    return [TextTable(rows, heading=True), plural(len(found), "model")]


def _details(one: Listed) -> list[str | TextTable]:
    entry = one.entry
    published = entry.parameters if isinstance(entry.parameters, str) else f"{entry.parameters:,}"
    facts = [
        ("hub id", entry.hub_id + (f"@{entry.revision}" if entry.revision else "")),
        ("family", entry.hf["model_type"]),
        ("license", entry.license or ""),
        ("parameters", f"{one.parameters:,}; published: {published} ({entry.source})"),
        ("active parameters", f"{one.active_parameters:,}"),
        ("context", "" if entry.context is None else f"{entry.context:,}"),
        ("forms and formats of files", ", ".join(one.formats)),
        *([("not published, so assumed", ", ".join(entry.assumed))] if entry.assumed else ()),
    ]
    rows: list[tuple[str, ...]] = [("format or recipe", "serve", "LoRA, rank 16", "train")]
    for name in one.serve:
        rows.append((name, *(format_size(uses[name]) for uses in (one.serve, one.fine_tune, one.train))))
    cache = f"keys, values and states of 1,024 positions: {format_size(one.cache_bytes)}"
    return [TextTable(facts, entry.name), TextTable(rows, "memory", heading=True), cache]


def _count(number: int) -> str:
    """A number of parameters in the field's words: 30.5B, 135M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 1e3 * size else f"{number / size:.0f}{unit}"
    return str(number)
