"""The verbs that read model folders and change nothing: inspect, verify, diff."""

import argparse
from pathlib import Path
from typing import Any

from ..sizes import plural
from ..terminal import TextTable, say_while_waiting
from .parser import Verbs, dtype, emit, needs, number, positive_count, read_text, verb
from .progress import byte_progress, loading_bars


def add(verbs: Verbs) -> None:
    """Add the verbs."""
    parser = verb(
        verbs,
        "inspect",
        run_inspect,
        "what a model folder holds",
        "Show the kind, family, configuration, parameter count and number formats of a model folder.\n"
        "Reads headers only, so it is instant for any size; --scales also reads the scales of quantized\n"
        "weights.",
        "te-models inspect ./moe",
    )
    parser.add_argument("folder", metavar="DIR", help="a te_models or Hugging Face folder")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--scales", action="store_true", help="read the scales of quantized weights, too")
    parser.add_argument("--no-verify", action="store_true", help="do not check what is read against manifest.json")

    parser = verb(
        verbs,
        "verify",
        run_verify,
        "whether two folders hold the same model, or one is intact",
        "Compare two model folders bit for bit, whatever their kind and layout. Exit code 0 if they\n"
        "hold the same model, 1 if not. With one folder: whether its files and tensors still have the\n"
        "SHA-256 that its manifest.json says; a training checkpoint is checked as a run that continues\n"
        "from it checks it.\n\n"
        "With --logits, compute instead: transformers runs A, a Hugging Face folder, and te_models runs\n"
        "B. Shows the divergence of next-token distributions, how often both put the same token first,\n"
        "and the first layer whose output differs by more than the tolerance. Exit code 0 if the logits\n"
        "are within the tolerance, 1 if not.",
        "te-models verify --logits ./SmolLM2-135M ./smollm2",
    )
    parser.add_argument("a", metavar="A", help="a model folder")
    parser.add_argument("b", metavar="B", nargs="?", help="a model folder (default: check A against its manifest)")
    parser.add_argument("--logits", action="store_true", help="compare what the models compute")
    parser.add_argument("--tokens", type=positive_count, metavar="N", help="with --logits: how many tokens (256)")
    parser.add_argument("--text", metavar="FILE", help="with --logits: a UTF-8 file to read (random tokens)")
    parser.add_argument(
        "--dtype", type=dtype, choices=("float32", "bfloat16"), help="with --logits: to compute in (float32)"
    )
    parser.add_argument(
        "--tolerance", type=number, metavar="X", help="with --logits: part of the largest logit (1e-4; bfloat16: 0.05)"
    )

    parser.add_argument(
        "--no-verify", action="store_true", help="with --logits: do not check the weights against manifest.json"
    )

    parser = verb(
        verbs,
        "diff",
        run_diff,
        "how two models differ",
        "Show in which fields of the configuration two model folders differ, which parameters only one\n"
        "has, and by how much values differ: the largest difference, and the root mean square of the\n"
        "differences relative to A's values. Parameters come in the order of the latter. Exit code 0 if\n"
        "nothing differs, 1 otherwise.",
        "te-models diff ./smollm2 ./trained",
    )
    parser.add_argument("a", metavar="A", help="a model folder")
    parser.add_argument("b", metavar="B", help="a model folder")
    parser.add_argument("--all", action="store_true", help="show every parameter that differs (the first 20)")


def run_inspect(args: argparse.Namespace) -> int:
    """Print what the headers say."""
    from te_models.checkpoints import inspect
    from te_models.checkpoints.tools.statistics import scale_statistics

    found = inspect(args.folder, verify=not args.no_verify)
    parts: list[str | TextTable] = [str(found)]
    if args.tensors:
        rows = [("  " + name, dtype, str(list(shape))) for name, (dtype, shape) in found.tensors.items()]
        parts.append(TextTable(rows))
    result = found.to_dict(tensors=args.tensors)
    if args.scales:
        statistics = scale_statistics(args.folder, verify=not args.no_verify)
        result["scales"] = {name: vars(s) for name, s in statistics.items()}
        parts += [
            f"  scales      {name}: {s.count:,} from {s.smallest:.3g} to {s.largest:.3g}, median {s.median:.3g}"
            for name, s in statistics.items()
        ]
    emit(args, result, *parts)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Print the comparison, or the check of one folder; 1 if the models differ or the folder was changed."""
    options = {name: getattr(args, name) for name in ("tokens", "text", "dtype", "tolerance")}
    chosen = {name: value for name, value in options.items() if value is not None}
    if args.logits:
        if args.b is None:
            raise ValueError("--logits compares two folders; only one is given")
        return _compare_logits(args, chosen | {"verify": not args.no_verify})
    if args.no_verify:
        raise ValueError("--no-verify needs --logits; two folders are compared without their manifests")
    needs(args, options, "--logits")
    if args.b is None:
        return _check_training(args) if (Path(args.a) / "training.json").exists() else _check_one(args)

    from te_models.checkpoints import verify

    with byte_progress("verify") as progress:
        report = verify(args.a, args.b, progress=progress)
    emit(args, report.to_dict(), str(report))
    return 0 if report.equal else 1


def run_diff(args: argparse.Namespace) -> int:
    """Print the differences; 1 if there are any."""
    from te_models.checkpoints import diff

    with byte_progress("diff") as progress:
        report = diff(args.a, args.b, progress=progress)
    lines: list[str | TextTable] = [f"config: {path}: {a} and {b}" for path, (a, b) in report.config.items()]
    lines += report.notes
    shown = report.tensors if args.all else report.tensors[:20]
    if shown:
        rows = [("parameter", "differing", "largest", "relative")]
        rows += [(t.name, f"{t.differing} of {t.elements}", f"{t.largest:.3g}", f"{t.relative:.3g}") for t in shown]
        lines.append(TextTable(rows, heading=True))
    hidden = len(report.tensors) - len(shown)
    lines += [f"... and {plural(hidden, 'more parameter')} (--all shows them)"] if hidden else []
    lines.append(f"{plural(report.equal_tensors, 'parameter')} equal, {len(report.tensors)} different")
    emit(args, report.to_dict(), *lines)
    return 0 if report.equal else 1


def _compare_logits(args: argparse.Namespace, options: dict[str, Any]) -> int:
    import torch

    from ..compare_logits import compare_logits

    if "text" in options:
        options["text"] = read_text(options["text"])
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    say_while_waiting(f"loading {args.a} and {args.b}, and computing the logits of both")
    with loading_bars():
        report = compare_logits(args.a, args.b, **options)
    emit(args, report.to_dict(), str(report))
    return 0 if report.agree else 1


def _check_one(args: argparse.Namespace) -> int:
    from te_models.checkpoints import CheckpointError, check_manifest
    from te_models.checkpoints.io.hub import local_folder
    from te_models.checkpoints.io.manifest import MANIFEST, read_manifest
    from te_models.checkpoints.io.model_folder import check_model_folder

    folder = local_folder(args.a)
    files, problem, held = 0, None, ""
    if not (folder / MANIFEST).exists():
        check_model_folder(folder)
        read_manifest(folder)  # raises: there is nothing that the folder could be checked against
    try:
        files = len(read_manifest(folder))
        with byte_progress("verify") as progress:
            held = plural(check_manifest(folder, progress=progress), "file")
    except CheckpointError as error:
        problem = str(error)
    text = f"{args.a}: {problem or f'{held} as manifest.json says'}"
    emit(args, {"intact": problem is None, "files": files, "problem": problem}, text)
    return 0 if problem is None else 1


def _check_training(args: argparse.Namespace) -> int:
    """Check a training checkpoint, and the model in it; 1 if it is not as it was written."""
    from ..training import TrainingCheckpointError
    from ..training.checkpoints.checkpoint import load_state

    files, problem, step = sum(file.is_file() for file in Path(args.a).rglob("*")), None, 0
    try:
        step = load_state(Path(args.a)).step
    except TrainingCheckpointError as error:
        problem = str(error)
    held = plural(files, "file")
    text = problem or f"{args.a}: {held} of a training checkpoint of step {step} as manifest.json says"
    emit(args, {"intact": problem is None, "files": files, "problem": problem}, text)
    return 0 if problem is None else 1
