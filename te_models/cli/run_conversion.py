"""What the verbs of `convert` do: call the conversion with the options, show progress, print what was done."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..sizes import format_size, plural
from ..terminal import show
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
    if foreign or args.config is not None:
        if args.config is None:
            raise CheckpointError(f"{args.source} is no model folder; --config says which model it is of")
        asked = {"--storage": args.storage, "--allow-requantize": args.allow_requantize, "--mtp": args.mtp}
        _refuse(asked | {"--dequantize": args.dequantize}, f"is of Hugging Face folders, and {args.source} is none")
        if args.run_file is not None:
            return _import_run(args)
        options = {"config": args.config, "system": args.system, "dtype": args.dtype, "layout": args.layout}
        options["qkv_weight_interleaved"] = not args.qkv_not_interleaved
        return _convert(args, import_checkpoint, **options)
    if any(value is not None for value in (args.system, args.run_file, args.step, args.qkv_not_interleaved or None)):
        raise CheckpointError(
            "--from, --run, --step and --qkv-not-interleaved are of training systems' checkpoints; --config says of "
            "which model"
        )
    options = {"storage": args.storage, "allow_requantize": args.allow_requantize, "dequantize": args.dequantize}
    options["mtp"] = args.mtp
    return _convert(args, import_hf, dtype=args.dtype, layout=args.layout, **options)


def _import_file(args: argparse.Namespace) -> int:
    """A GGUF file to our folder."""
    from ..gguf import import_gguf

    asked = {"--storage": args.storage, "--allow-requantize": args.allow_requantize, "--mtp": args.mtp}
    _refuse(asked, "is of Hugging Face folders; a GGUF file is read as values")
    asked = {"--config": args.config, "--from": args.system, "--run": args.run_file, "--step": args.step}
    _refuse(asked, f"is of distributed checkpoints, and {args.source} is a file")
    return _convert(args, import_gguf, dtype=args.dtype, layout=args.layout)


def _refuse(asked: dict[str, object], why: str) -> None:
    """Raise ValueError for the first option with a value."""
    unfit = [name for name, value in asked.items() if value not in (None, False)]
    if unfit:
        raise ValueError(f"{unfit[0]} {why}")


def _import_run(args: argparse.Namespace) -> int:
    """A distributed checkpoint with its optimizer as the beginning of a run."""
    from ..training.config.file import read_config
    from ..training.exchange import import_run

    config = read_config(Path(args.run_file)).replace(output_dir=args.out)
    folder = import_run(Path(args.source), config, model=Path(args.config), system=args.system, step=args.step)
    result = {"verb": args.verb, "source": args.source, "out": str(folder)}
    emit(args, result, f"wrote {folder}; te-models train {args.run_file} --output-dir {args.out} goes on from there")
    return 0


RANKS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "make_vocab_size_divisible_by",
)
"""What says how files of Megatron's ranks are split."""


def run_export(args: argparse.Namespace) -> int:
    """Our folder to a Hugging Face one, a GGUF file, or a training system's checkpoint."""
    if args.adapter is not None:
        asked = {"--to": args.to if args.to != "hf" else None, "--type": args.type, "--form": args.form}
        asked |= {"--format": args.format, "--dequantize": args.dequantize, "--dtype": args.dtype}
        _refuse(asked | {"--dry-run": args.dry_run}, "is of models; allowed with --adapter: --base-model, --family")
        from .adapters import run_adapter_export

        return run_adapter_export(args)
    _refuse({"--base-model": args.base_model}, "is of adapters: --adapter")
    of_ranks = {f"--{name.replace('_', '-')}": getattr(args, name) for name in RANKS}
    _refuse({} if args.to == "megatron" else of_ranks | {"--local-modules": args.local}, "is of --to megatron")
    _refuse({} if args.to == "transformer_engine" else {"--layout": args.layout}, "is of --to transformer_engine")
    _refuse(
        {} if args.to == "gguf" else {"--type": args.type},
        "is of GGUF files: --to gguf; allowed for folders: --dtype, --format",
    )
    is_run = (Path(args.source) / "training.json").is_file()
    if args.to in ("hf", "gguf"):
        write = _export_file if args.to == "gguf" else _export
        return _export_run(args, write) if is_run else write(args)
    from te_models.checkpoints import export_checkpoint

    asked = {"--family": args.family, "--form": args.form, "--format": args.format, "--dequantize": args.dequantize}
    asked["--allow-requantize"] = args.allow_requantize
    _refuse(asked, f"is of Hugging Face folders, and --to {args.to} writes none")
    if not is_run:
        ranks = {name: getattr(args, name) for name in RANKS if getattr(args, name) is not None}
        return _convert(
            args, export_checkpoint, to=args.to, dtype=args.dtype, layout=args.layout, local_modules=args.local, **ranks
        )
    from ..training.exchange import export_run

    export_run(Path(args.source), Path(args.out), to=args.to, overwrite=args.force)
    emit(args, {"verb": args.verb, "source": args.source, "out": args.out}, f"wrote {args.out}, model and moments")
    return 0


def _export_run(args: argparse.Namespace, write: Callable[[argparse.Namespace], int]) -> int:
    """A training checkpoint, by way of a te_models folder beside the result."""
    from te_models.checkpoints.io.destination import check_destination

    from ..training.exporting import export_alone

    out = Path(args.out)
    if write is _export:
        check_replaceable(out, force=args.force)
        check_destination(out, overwrite=args.force)
    elif out.exists() and not args.force:
        raise ValueError(f"{out} exists; --force replaces it")
    between = out.with_name(f".{out.name}.from-checkpoint")
    try:
        export_alone(Path(args.source), between)
        args.model = between
        return write(args)
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _export(args: argparse.Namespace) -> int:
    from te_models.checkpoints import export_hf

    options = {"family": args.family, "form": args.form, "format": args.format}
    options |= {"allow_requantize": args.allow_requantize, "dequantize": args.dequantize}
    code = _convert(args, export_hf, dtype=args.dtype, **options)
    if not args.json and not args.dry_run:
        show(*_missing_reader(Path(args.out)))
    return code


def _export_file(args: argparse.Namespace) -> int:
    """Our folder to a GGUF file."""
    from ..gguf import export_gguf

    asked = {"--format": args.format, "--form": args.form, "--dtype": args.dtype, "--dry-run": args.dry_run}
    asked["--allow-requantize"] = args.allow_requantize
    _refuse(asked, "is of Hugging Face folders; allowed with --to gguf: --type, --family, --force")
    start = time.perf_counter()
    with byte_progress(args.verb) as progress:
        options = {"type": args.type or "f16", "family": args.family, "overwrite": args.force}
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


def run_relayout(args: argparse.Namespace) -> int:
    """Experts grouped or one by one."""
    from te_models.checkpoints import relayout

    return _convert(args, relayout, layout=args.layout)


def run_reshard(args: argparse.Namespace) -> int:
    """The same tensors in other files."""
    from te_models.checkpoints import reshard

    return _convert(args, reshard)


def run_quantize(args: argparse.Namespace) -> int:
    """Linear weights stored as a recipe quantizes them."""
    from te_models.checkpoints import quantize

    return _convert(args, quantize, recipe=args.recipe)


def run_dequantize(args: argparse.Namespace) -> int:
    """Quantized weights as plain ones."""
    from te_models.checkpoints import dequantize

    return _convert(args, dequantize, dtype=args.dtype)


def run_upcycle(args: argparse.Namespace) -> int:
    """A dense model as a mixture of experts."""
    from te_models.checkpoints import upcycle

    options = {"layers": args.layers, "noise_std": args.noise_std, "seed": args.seed, "layout": args.layout}
    return _convert(args, upcycle, num_experts=args.experts, topk=args.topk, **options)


def run_toy(args: argparse.Namespace) -> int:
    """A small part of a Hugging Face folder, or a small model like one of the catalogue."""
    from te_models.checkpoints import toy

    from .. import catalogue

    if "/" not in args.source and not Path(args.source).exists():
        catalogue.entry(args.source)  # before torch is imported: that takes long
        return _convert(args, catalogue.random_toy, layers=args.layers, experts=args.experts)
    return _convert(args, toy, layers=args.layers or 2, experts=args.experts)


def _model_of(args: argparse.Namespace) -> str:
    """Return the folder that is read: the one that the user named, or the model of the checkpoint that that one is."""
    return str(getattr(args, "model", args.source))


def _convert(args: argparse.Namespace, function: Callable[..., Any], **options: Any) -> int:
    """Run one conversion with progress and print what it did."""
    out, start = Path(args.out), time.perf_counter()
    check_replaceable(out, force=args.force)
    with byte_progress(args.verb) as progress:
        options |= {"overwrite": args.force, "dry_run": args.dry_run, "max_shard_bytes": args.max_shard_size}
        options |= {"verify": not args.no_verify, "file_digests": args.file_digests}
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
