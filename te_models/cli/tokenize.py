"""`te-models tokenize`: files to a token data set."""

import argparse
from dataclasses import fields
from typing import Any

from ..sizes import plural
from .parser import Verbs, emit, integer, positive_count, verb
from .progress import byte_progress

DESCRIPTION = """\
Turn files into a token data set, which data.path of a training configuration names. INPUT is a
text file, .jsonl, .json with rows, .parquet (extra data), a folder that datasets.save_to_disk wrote
(extra data), any other folder, which means all such files in it and below it, a glob pattern in
quotes, or hf://NAME@CONFIGURATION:SPLIT, a data set that datasets streams from the hub or from a
folder (extra data; split train by default). Documents keep their boundaries.
Files are read in a shuffled order with a fixed seed; the result does not depend on --workers. A
run that was interrupted, or stopped at a row that cannot be used, goes on when it is started
again."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "tokenize",
        run,
        "text, JSON lines or tables to a token data set",
        DESCRIPTION,
        'te-models tokenize "corpus/**/*.jsonl" --tokenizer ./smollm2 --output data/corpus --workers 8',
    )
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="files, folders or glob patterns")
    parser.add_argument("--tokenizer", required=True, help='folder with a tokenizer.json, or "bytes"')
    parser.add_argument("--output", required=True, help="the folder to write")
    if verbs.asked in (None, "tokenize"):  # the keys of [data] take a part of a second to import
        from ..training.config import DataConfig
        from ..training.data.options import DocumentOptions
        from .options import add_options

        names = ("text_field", "messages_field", *(f.name for f in fields(DocumentOptions)))
        add_options(parser, DataConfig, names, {"fields": "--field", "roles": "--role"})
    parser.add_argument("--workers", type=positive_count, default=1, help="tokenizer processes (1)")
    parser.add_argument("--seed", type=integer, default=0, help="decides the order of the files (0)")


def run(args: argparse.Namespace) -> int:
    """Tokenize, and say what was written."""
    from ..training.data.dataset import read_meta
    from ..training.data.options import DocumentOptions
    from ..training.data.tokenize import build_dataset

    values: dict[str, Any] = {f.name: getattr(args, f.name) for f in fields(DocumentOptions)}
    values |= {"fields": tuple(args.fields), "roles": tuple(args.roles)}
    options = DocumentOptions(**values)
    with byte_progress("tokenize") as report:
        dataset = build_dataset(
            args.output,
            args.inputs,
            args.tokenizer,
            text_field=args.text_field,
            messages_field=args.messages_field,
            options=options,
            shuffle_seed=args.seed,
            workers=args.workers,
            report=report,
        )
    scored = None
    if dataset.loss_mask is not None:
        step = 1 << 24
        scored = sum(
            int(dataset.loss_mask.read(start, min(step, len(dataset) - start)).sum())
            for start in range(0, len(dataset), step)
        )
    result = {
        "output": str(dataset.path),
        "tokens": len(dataset),
        "documents": dataset.num_documents,
        "vocab_size": dataset.vocab_size,
        "scored_tokens": scored,
    }
    source = read_meta(dataset.path)["source"]
    if "skipped_rows" in source:
        result |= {"skipped_rows": source["skipped_rows"], "first_skipped": source["first_skipped"]}
    counted = "" if scored is None else f", {scored:,} of them scored"
    lines = [f"{plural(len(dataset), 'token')}{counted} in {plural(dataset.num_documents, 'document')}: {dataset.path}"]
    if "skipped_rows" in source:
        lines.append(f"passed over: {plural(source['skipped_rows'], 'row')}, such as: {source['first_skipped'][0]}")
    emit(args, result, *lines)
    return 0
