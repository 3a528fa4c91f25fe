"""`te-models eval`: how well a model predicts text files, and tasks of lm-evaluation-harness."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..terminal import TextTable, say_while_waiting
from .adapters import adapter_folder, check_is_model, load_model
from .codec import Codec, check_device, open_codec
from .parser import Verbs, dtype, emit, integer, needs, positive_count, verb

DESCRIPTION = """\
Measure a model folder (ours or Hugging Face's). --text: perplexity, nats per token and bits per
byte of files as `te-models tokenize` reads them (text, .jsonl, .parquet). Windows of --seq-length
tokens begin every --stride tokens, and each token is predicted once. A document begins after the
token that the tokenizer puts before every text, or else after the one that ends a text.
--task: tasks of lm-evaluation-harness (extra `eval`), also from YAML files in --task-folder."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "eval",
        run,
        "perplexity on text files, and lm-evaluation-harness tasks",
        DESCRIPTION,
        'te-models eval ./model --text "held-out/*.txt" --seq-length 1024 --stride 512',
    )
    parser.add_argument("model", metavar="DIR", help="the model folder")
    parser.add_argument("--text", metavar="FILE", nargs="+", default=[], help="files or glob patterns")
    parser.add_argument("--text-field", default="text", help="field or column with the text of a document (text)")
    parser.add_argument(
        "--seq-length", type=positive_count, metavar="N", help="tokens of a window (the model's, up to 1024)"
    )
    parser.add_argument("--stride", type=positive_count, metavar="N", help="tokens between windows (half a window)")
    parser.add_argument(
        "--batch-size", type=positive_count, default=1, metavar="N", help="windows or questions at a time (1)"
    )
    parser.add_argument("--task", metavar="NAME", nargs="+", default=[], help="tasks of lm-evaluation-harness")
    parser.add_argument("--task-folder", metavar="DIR", help="folder of YAML files with further tasks")
    parser.add_argument("--num-fewshot", type=integer, metavar="N", help="examples before a question (the task's)")
    parser.add_argument("--limit", type=positive_count, metavar="N", help="documents of each task (all)")
    parser.add_argument(
        "--dtype", type=dtype, choices=("bfloat16", "float32"), default="bfloat16", help="weights and compute"
    )
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA or DoRA adapter to put over the model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--no-verify", action="store_true", help="do not check the weights against manifest.json")
    parser.add_argument("--tokenizer", metavar="DIR", help='folder with tokenizer.json, or "bytes", if DIR has none')


def run(args: argparse.Namespace) -> int:
    """Print the numbers of each file, of all of them, and of each task."""
    from te_models.checkpoints.io.hub import local_folder

    if not args.text and not args.task:
        raise ValueError("eval needs --text or --task")
    if not args.text:
        needs(args, ("text_field", "seq_length", "stride", "no_verify", "tokenizer"), "--text")
    if not args.task:
        needs(args, ("task_folder", "num_fewshot", "limit"), "--task")
    check_device(args.device)
    result: dict[str, Any] = {}
    parts: list[str | TextTable] = []
    folder = local_folder(args.model)
    check_is_model(folder, args.model)
    args.adapter = adapter_folder(args.adapter)
    if args.text:
        result["text"] = _score_text(args, folder)
        rows = [("", "nats per token", "perplexity", "bits per byte", "tokens")]
        rows += [_row(name, numbers) for name, numbers in result["text"]["files"].items()]
        rows += [_row("all", result["text"]["all"])] if len(rows) > 2 else []
        parts.append(TextTable(rows, heading=True))
    if args.task:
        from ..evaluation.harness import run_tasks

        result["tasks"] = run_tasks(
            folder,
            args.task,
            task_folder=None if args.task_folder is None else Path(args.task_folder),
            dtype=args.dtype,
            device=args.device,
            batch_size=args.batch_size,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            adapter=args.adapter,
        )
        rows = [
            (task, name, f"{value:.4f}") for task, numbers in result["tasks"].items() for name, value in numbers.items()
        ]
        parts.append(TextTable([("task", "metric", "value"), *rows], heading=True))
    emit(args, result, *parts)
    return 0


def _score_text(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch

    from ..evaluation import TextScore, score_documents
    from ..training.data.documents import matching_files

    files = matching_files(args.text)
    codec = open_codec(folder, args.tokenizer, "eval")
    say_while_waiting(f"loading {args.model}")
    dtype = getattr(torch, args.dtype)
    model = load_model(folder, args.adapter, dtype=dtype, device=args.device, verify=not args.no_verify)
    length = min(1024, model.config.max_position_embeddings) if args.seq_length is None else args.seq_length
    stride = max(1, length // 2) if args.stride is None else args.stride
    found: dict[str, TextScore] = {}
    for file in files:
        say_while_waiting(f"reading {file}")
        documents = _documents(file, args.text_field, codec)
        found[str(file)] = score_documents(
            model, documents, seq_length=length, stride=stride, batch_size=args.batch_size
        )
    everything = sum(found.values(), TextScore(0.0, 0, 0, 0))
    if not everything.tokens:
        raise ValueError("--text has no token to predict; allowed: files with text")
    return {
        "seq_length": length,
        "stride": stride,
        "files": {name: score.to_dict() for name, score in found.items()},
        "all": everything.to_dict(),
    }


def _documents(file: Path, field: str, codec: Codec) -> Iterator[tuple[list[int], int]]:
    """Yield the ids of each document of a file, and how many bytes its text has."""
    from ..training.data.documents import documents_of, spans_of
    from ..training.data.formats import Fields

    fields, prefix = Fields(names={"text": field}), codec.prefix()
    for span in spans_of(file, fields):
        for document in documents_of(span, fields):
            text = "".join(document.pieces)
            yield prefix + codec.encode(text), len(text.encode("utf-8", "replace"))


def _row(name: str, numbers: dict[str, Any]) -> tuple[str, ...]:
    values = (numbers["nats_per_token"], numbers["perplexity"], numbers["bits_per_byte"])
    return (name, *("-" if value is None else f"{value:.4f}" for value in values), f"{numbers['tokens']:,}")
