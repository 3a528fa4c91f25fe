"""The verbs that read model folders and change nothing: inspect, verify."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parser import Verbs, emit, table, verb
from .progress import byte_progress


def add(verbs: Verbs) -> None:
    """Add the verbs."""
    parser = verb(
        verbs,
        "inspect",
        run_inspect,
        "what a model folder holds",
        "Show the kind, family, configuration, parameter count and number formats of a model folder.\n"
        "Reads headers only, so it is instant for any size.",
        "te-models inspect ./moe",
    )
    parser.add_argument("folder", metavar="DIR", help="a te_models or Hugging Face folder")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")

    parser = verb(
        verbs,
        "verify",
        run_verify,
        "whether two folders hold the same model, or one is intact",
        "Compare two model folders bit for bit, whatever their kind and layout. Exit code 0 if they\n"
        "hold the same model, 1 if not. With one folder: whether its files and tensors still have the\n"
        "SHA-256 that its manifest.json says.",
        "te-models verify ./SmolLM2-135M ./smollm2",
    )
    parser.add_argument("a", metavar="A", help="a model folder")
    parser.add_argument("b", metavar="B", nargs="?", help="a model folder (default: check A against its manifest)")


def run_inspect(args: argparse.Namespace) -> int:
    """Print what the headers say."""
    from te_models.checkpoints import inspect

    found = inspect(args.folder)
    text = str(found)
    if args.tensors:
        rows = [("  " + name, dtype, str(list(shape))) for name, (dtype, shape) in found.tensors.items()]
        text += "\n" + table(rows)
    emit(args, found.to_dict(tensors=args.tensors), text)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Print the comparison, or the check of one folder; 1 if the models differ or the folder was changed."""
    if args.b is None:
        return _check_one(args)
    from te_models.checkpoints import verify

    with byte_progress("verify") as progress:
        report = verify(args.a, args.b, progress=progress)
    emit(args, report.to_dict(), str(report))
    return 0 if report.equal else 1


def _check_one(args: argparse.Namespace) -> int:
    from te_models.checkpoints import CheckpointError, check_manifest
    from te_models.checkpoints.manifest import read_manifest

    files, problem = len(read_manifest(Path(args.a))), None
    try:
        with byte_progress("verify") as progress:
            check_manifest(args.a, progress=progress)
    except CheckpointError as error:
        problem = str(error)
    text = f"{args.a}: {problem or f'{files} files are as manifest.json says'}"
    emit(args, {"intact": problem is None, "files": files, "problem": problem}, text)
    return 0 if problem is None else 1
