"""`te-models tokenize`: files to a token data set."""

from __future__ import annotations

import argparse

from .parser import Verbs, count, emit, integer, verb
from .progress import byte_progress

DESCRIPTION = """\
Turn files into a token data set, which data.path of a training configuration names. INPUT is a
text file, .jsonl, .parquet (extra data), a folder that datasets.save_to_disk wrote (extra data),
any other folder, which means all such files in it and below it, a glob pattern in quotes, or
hf://NAME@CONFIGURATION:SPLIT, a data set that datasets streams from the hub or from a folder
(extra data; split train by default). Documents keep their boundaries.
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
    parser.add_argument("--text-field", default="text", help="field or column with the text of a document (text)")
    parser.add_argument(
        "--messages-field", help="field with a list of chat messages: the loss counts the assistant's alone"
    )
    parser.add_argument("--workers", type=count, default=1, help="tokenizer processes (1)")
    parser.add_argument("--seed", type=integer, default=0, help="decides the order of the files (0)")


def run(args: argparse.Namespace) -> int:
    """Tokenize, and say what was written."""
    if args.workers < 1:
        raise ValueError(f"--workers is {args.workers}; allowed: a positive integer")
    from ..training.data.tokenize import build_dataset

    with byte_progress("tokenize") as report:
        dataset = build_dataset(
            args.output,
            args.inputs,
            args.tokenizer,
            text_field=args.text_field,
            messages_field=args.messages_field,
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
    counted = "" if scored is None else f", {scored:,} of them scored"
    emit(args, result, f"{len(dataset):,} tokens{counted} in {dataset.num_documents:,} documents: {dataset.path}")
    return 0
