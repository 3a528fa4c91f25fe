"""`te-models tokenize`: files to a token data set."""

from __future__ import annotations

import argparse

from ..sizes import plural
from ..training.data.formats import FORMATS
from .parser import Verbs, count, emit, integer, verb
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
    parser.add_argument("--text-field", default="text", help="field or column with the text of a document (text)")
    parser.add_argument(
        "--messages-field", help="field with a list of chat messages: the loss counts the assistant's alone"
    )
    parser.add_argument(
        "--format", choices=tuple(FORMATS), help="what a row is (text, or messages with --messages-field)"
    )
    parser.add_argument(
        "--field", metavar="NAME=FIELD", action="append", default=[], help="what files call a field (repeatable)"
    )
    parser.add_argument(
        "--role", metavar="NAME=ROLE", action="append", default=[], help="what files call who speaks (repeatable)"
    )
    parser.add_argument("--join-parts", action="store_true", help="join content in parts of text into one text")
    parser.add_argument(
        "--rewritten-chats",
        choices=("rows", "final"),
        default="rows",
        help="templates that rewrite earlier answers: a row for each answer, or the chat as it ends (rows)",
    )
    for name, token in (("bos", "begins"), ("eos", "ends")):
        one = parser.add_mutually_exclusive_group()
        one.add_argument(f"--add-{name}-token", action="store_true", help=f"always add the token that {token} a text")
        one.add_argument(f"--no-{name}-token", action="store_true", help=f"add no token that {token} a text")
    parser.add_argument("--eos-token", metavar="TOKEN", help="the token that ends documents and answers (the folder's)")
    parser.add_argument(
        "--skip-bad-rows", action="store_true", help="pass over rows that cannot be used, and count them"
    )
    parser.add_argument("--workers", type=count, default=1, help="tokenizer processes (1)")
    parser.add_argument("--seed", type=integer, default=0, help="decides the order of the files (0)")


def run(args: argparse.Namespace) -> int:
    """Tokenize, and say what was written."""
    if args.workers < 1:
        raise ValueError(f"--workers is {args.workers}; allowed: a positive integer")
    from ..training.data.dataset import read_meta
    from ..training.data.options import DocumentOptions
    from ..training.data.tokenize import build_dataset

    options = DocumentOptions(
        format=args.format,
        fields=tuple(args.field),
        roles=tuple(args.role),
        join_parts=args.join_parts,
        rewritten_chats=args.rewritten_chats,
        add_bos_token=True if args.add_bos_token else False if args.no_bos_token else "auto",
        add_eos_token=True if args.add_eos_token else False if args.no_eos_token else "auto",
        eos_token=args.eos_token,
        skip_bad_rows=args.skip_bad_rows,
    )
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
