"""What the verbs of `convert` do: call the conversion with the options, show progress, print what was done."""

import argparse
import contextlib
import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..sizes import format_size, plural
from ..terminal import show
from .options import fields_of, flag_of
from .parser import emit
from .progress import byte_progress


def run_import(args: argparse.Namespace) -> int:
    """Hugging Face folder, GGUF file, or a training system's checkpoint, to ours."""
    if Path(args.source).suffix == ".gguf" and Path(args.source).is_file():
        return _import_file(args)
    from te_models.checkpoints import CheckpointError, import_checkpoint, import_hf
    from te_models.checkpoints.tools.foreign import is_foreign

    foreign = is_foreign(Path(args.source))
    if Path(args.source).is_file() and not foreign:
        return _import_file(args)
    if not foreign and args.config is None:
        why = "is of training systems' checkpoints; --config says of which model"
        _refuse(args, ("system", "run_file", "step", "qkv_weight_interleaved"), why)
        return _convert(args, import_hf, "dtype", "layout", "storage", "allow_requantize", "dequantize", "mtp")
    if args.config is None:
        raise CheckpointError(f"{args.source} is no model folder; --config says which model it is of")
    why = f"is of Hugging Face folders, and {args.source} is none"
    _refuse(args, ("storage", "allow_requantize", "mtp", "dequantize"), why)
    if args.run_file is not None:
        return _import_run(args)
    names = ("config", "system", "dtype", "layout", "qkv_weight_interleaved")
    return _convert(args, import_checkpoint, *names, unread=("verify",))


def _import_file(args: argparse.Namespace) -> int:
    """A GGUF file to our folder."""
    from ..gguf import import_gguf

    why = "is of Hugging Face folders; a GGUF file is read as values"
    _refuse(args, ("storage", "allow_requantize", "mtp"), why)
    why = f"is of distributed checkpoints, and {args.source} is a file"
    _refuse(args, ("config", "system", "run_file", "step"), why)
    read = ("dequantize",) if args.dequantize else ()  # as which it is read anyway
    return _convert(args, import_gguf, "dtype", "layout", also=read)


def _refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise ValueError for the first of these options that was written."""
    for name in names:
        if name in args.written:
            raise ValueError(f"{flag_of(args.part, name)} {why}")


def _refuse_others(args: argparse.Namespace, *read: str) -> None:
    """Raise ValueError for an option that was written, when it is not one that this run reads."""
    known = fields_of(args.part)
    allowed = ", ".join(flag_of(args.part, name) for name in known if name in read)
    _refuse(args, (name for name in known if name not in read), f"does nothing here; allowed: {allowed}")


def _import_run(args: argparse.Namespace) -> int:
    """A distributed checkpoint with its optimizer as the beginning of a run."""
    from ..training.config.file import read_config
    from ..training.exchange import import_run

    _refuse_others(args, "config", "run_file", "step", "system")
    config = read_config(Path(args.run_file)).replace(output_dir=args.out)
    folder = import_run(Path(args.source), config, model=Path(args.config), system=args.system, step=args.step)
    result = {"verb": args.verb, "source": args.source, "out": str(folder)}
    emit(args, result, f"wrote {folder}; te-models train {args.run_file} --output-dir {args.out} goes on from there")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Our folder to a Hugging Face one, a GGUF file, or a training system's checkpoint."""
    if args.adapter is not None:
        names = ("to", "type", "form", "recipe", "format", "dequantize", "dtype", "dry_run")
        _refuse(args, names, "is of models; allowed with --adapter: --base-model, --family")
        from .adapters import run_adapter_export

        _refuse_others(args, "adapter", "base_model", "family", "overwrite", "verify")
        return run_adapter_export(args)
    from te_models.checkpoints.tools.options import RanksOptions

    _refuse(args, ("base_model",), "is of adapters: --adapter")
    if args.to != "megatron":
        _refuse(args, fields_of(RanksOptions), "is of --to megatron")
    if args.to != "transformer_engine":
        _refuse(args, ("layout",), "is of --to transformer_engine")
    if args.to != "gguf":
        _refuse(args, ("type",), "is of GGUF files: --to gguf; allowed for folders: --dtype, --format")
    is_run = (Path(args.source) / "training.json").is_file()
    if args.to in ("hf", "gguf"):
        write = _export_file if args.to == "gguf" else _export
        return _export_run(args, write) if is_run else write(args)
    from te_models.checkpoints import export_checkpoint

    names = ("family", "form", "recipe", "format", "dequantize", "allow_requantize")
    _refuse(args, names, f"is of Hugging Face folders, and --to {args.to} writes none")
    if not is_run:
        sizes = () if args.to == "transformer_engine" and not Path(args.out).suffix else ("max_shard_bytes",)
        names = ("to", "dtype", "layout", *fields_of(RanksOptions))
        return _convert(args, export_checkpoint, *names, unread=("file_digests", *sizes))
    from ..training.exchange import export_run

    _refuse_others(args, "to", "overwrite")
    export_run(Path(args.source), Path(args.out), to=args.to, overwrite=args.overwrite)
    emit(args, {"verb": args.verb, "source": args.source, "out": args.out}, f"wrote {args.out}, model and moments")
    return 0


def _export_run(args: argparse.Namespace, write: Callable[[argparse.Namespace], int]) -> int:
    """A training checkpoint, by way of a te_models folder beside the result."""
    from te_models.checkpoints import CheckpointError
    from te_models.checkpoints.io.destination import check_destination

    from ..training.exporting import export_alone

    out = Path(args.out)
    if write is _export:
        check_replaceable(out, force=args.overwrite)
        check_destination(out, overwrite=args.overwrite)
    elif out.exists() and not args.overwrite:
        raise ValueError(f"{out} exists; --force replaces it")
    between = out.with_name(f".{out.name}.from-checkpoint")
    try:
        export_alone(Path(args.source), between)
        args.model = between
        return write(args)
    except CheckpointError as error:  # of the folder that the user named
        raise CheckpointError(str(error).replace(str(between), args.source)) from None
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _export(args: argparse.Namespace) -> int:
    from te_models.checkpoints import export_hf

    names = ("family", "form", "recipe", "format", "allow_requantize", "dequantize", "dtype")
    code = _convert(args, export_hf, *names, also=("to",))
    if not args.json and not args.dry_run:
        show(*_missing_reader(Path(args.out)))
    return code


def _export_file(args: argparse.Namespace) -> int:
    """Our folder to a GGUF file."""
    from ..gguf import export_gguf

    names = ("recipe", "format", "form", "dtype", "dry_run", "allow_requantize")
    _refuse(args, names, "is of Hugging Face folders; allowed with --to gguf: --type, --family, --force")
    _refuse_others(args, "to", "type", "family", "dequantize", "overwrite")
    start = time.perf_counter()
    with byte_progress(args.verb) as progress:
        options = {"type": args.type or "f16", "family": args.family, "overwrite": args.overwrite}
        notes = export_gguf(_model_of(args), args.out, progress=progress, **options)
    size, seconds = Path(args.out).stat().st_size, round(time.perf_counter() - start, 3)
    result = {"verb": args.verb, "source": args.source, "out": args.out, "seconds": seconds, "bytes": size}
    text = f"in {seconds:.1f} s wrote {args.out}: {format_size(size)}" + "".join(f"\nnote: {note}" for note in notes)
    emit(args, result | {"notes": notes}, text)
    return 0


READERS = dict.fromkeys(("fp8", "mxfp4", "mxfp8"), "accelerate") | {"compressed-tensors": "compressed_tensors"}
"""The package that transformers needs to read a quantized folder, by the `quant_method` in its config.json."""


def _missing_reader(out: Path) -> list[str]:
    """Return the sentence that names the package which transformers needs for an export and which is not installed."""
    from te_models.checkpoints.formats import config_within, said_of_quantization
    from te_models.checkpoints.io.strict_json import read_object

    quantization = config_within(said_of_quantization(read_object(out / "config.json")))
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    package = READERS.get(str(method))
    if package is None or importlib.util.find_spec(package) is not None:
        return []
    name = package.replace("_", "-")
    return [f"note: to read it, transformers needs the package {name!r}: pip install 'te_models[quantized]'"]


def run_named(args: argparse.Namespace) -> int:
    """The conversion of the verb's name, with its options as arguments."""
    from te_models import checkpoints
    from te_models.checkpoints.tools.options import ShardedOptions

    name = "reshard" if args.verb == "merge-shards" else args.verb
    return _convert(args, getattr(checkpoints, name), *(fields_of(args.part).keys() - fields_of(ShardedOptions).keys()))


def run_toy(args: argparse.Namespace) -> int:
    """A small part of a Hugging Face folder, or a small model like one of the catalogue."""
    from te_models.checkpoints import toy

    from .. import catalogue

    if "/" not in args.source and not Path(args.source).exists():
        catalogue.entry(args.source)  # before torch is imported, which takes long
        return _convert(args, catalogue.random_toy, "layers", "experts")
    args.layers = args.layers or 2
    return _convert(args, toy, "layers", "experts")


def _model_of(args: argparse.Namespace) -> str:
    """Return the folder that is read: the one that the user named, or the model of the checkpoint that that one is."""
    return str(getattr(args, "model", args.source))


def _convert(
    args: argparse.Namespace,
    function: Callable[..., Any],
    *names: str,
    also: tuple[str, ...] = (),
    unread: tuple[str, ...] = (),
) -> int:
    """Run one conversion with progress, with these options and the options of every conversion, and print what it did.
    also: further options that count; unread: options of every conversion that do nothing in this one."""
    from te_models.checkpoints.tools.options import ConversionOptions, ShardedOptions

    _refuse_others(args, *names, *also, *(name for name in fields_of(ShardedOptions) if name not in unread))
    out, start = Path(args.out), time.perf_counter()
    check_replaceable(out, force=args.overwrite)
    options = {name: getattr(args, name) for name in (*fields_of(ConversionOptions), *names)}
    options["max_shard_bytes"] = getattr(args, "max_shard_bytes", sys.maxsize)
    with byte_progress(args.verb) as progress:
        plan = function(_model_of(args), out, progress=progress, **options)
    result = {
        "verb": args.verb,
        "source": args.source,
        "out": args.out,
        "dry_run": args.dry_run,
        "seconds": round(time.perf_counter() - start, 3),
        "plan": plan.to_dict(),
    }
    did = "would write" if args.dry_run else f"in {result['seconds']:.1f} s wrote"
    text = f"{did} {out}: {plural(len(plan.outputs), 'tensor')}, {format_size(plan.total_bytes)}"
    if plan.passthrough:
        text += f"\nkept {plural(len(plan.passthrough), 'tensor')} that the model does not use"
    if plan.ignored:
        text += f"\nleft out {', '.join(plan.ignored[:4])}" + (" ..." if len(plan.ignored) > 4 else "")
    text += "".join(f"\nnote: {note}" for note in plan.notes)
    about = [str(plan)] if args.dry_run else []
    about += [] if plan.report is None else [str(plan.report)]
    emit(args, result, "\n".join([*about, text]))
    return 0


def check_replaceable(out: Path, *, force: bool) -> None:
    """Only a model folder is ever replaced, whatever the user typed for OUT."""
    from te_models.checkpoints.io.destination import check_place

    check_place(out)
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not force:
        raise ValueError(f"{out} exists; --force replaces it")
    if not _is_model_folder(out):
        raise ValueError(f"{out} is not a model folder, so --force does not replace it")


def _is_model_folder(folder: Path) -> bool:
    """Whether a folder's config.json describes a model (other programs have one, too), or weights lie beside it."""
    from te_models.checkpoints import CheckpointError
    from te_models.checkpoints.io.strict_json import read_object

    config = folder / "config.json"
    if not config.is_file():
        return False
    with contextlib.suppress(CheckpointError):  # damaged or not, what lies beside weights is replaced
        if isinstance(read_object(config).get("model_type"), str):
            return True
    return any(folder.glob("*.safetensors"))
