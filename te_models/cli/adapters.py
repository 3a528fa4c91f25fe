"""Adapters for the verbs that run models (`--adapter`), and `te-models merge`, which adds one to the weights."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..terminal import say_while_waiting
from .parser import Verbs, dtype, emit, integer, verb

if TYPE_CHECKING:
    from ..model import GPTModel

CONFIG = "adapter_config.json"

DESCRIPTION = """\
Write the model of DIR with the adapter of ADAPTER, a folder that training wrote as adapter/ or peft
wrote for transformers' model, added to its weights. The sum is computed in float32 and rounded once.
16-bit weights are too coarse for the changes of a small adapter: what rounding loses of them is
printed, --dtype float32 keeps all of it, and --rounding stochastic keeps it on average. Weights
stored quantized become plain values."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "merge",
        run,
        "a model with a LoRA or DoRA adapter in its weights",
        DESCRIPTION,
        "te-models merge ./model ./runs/lora/adapter ./merged --dtype float32",
    )
    parser.add_argument("model", metavar="DIR", help="the model folder")
    parser.add_argument("adapter", metavar="ADAPTER", help="the adapter's folder")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--dtype", type=dtype, choices=("float32", "bfloat16"), help="of the weights (default: as stored)"
    )
    parser.add_argument("--rounding", choices=("nearest", "stochastic"), default="nearest", help="(nearest)")
    parser.add_argument("--seed", type=integer, default=0, help="with --rounding stochastic (0)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--no-verify", action="store_true", help="do not check the weights against manifest.json")


def run(args: argparse.Namespace) -> int:
    """Write the merged model and print what the rounding lost."""
    import torch

    from te_models.checkpoints import open_checkpoint
    from te_models.checkpoints.folder.provenance import main_dtype
    from te_models.checkpoints.io.dtypes import torch_dtype
    from te_models.checkpoints.io.hub import local_folder

    from ..lora import merge_lora
    from ..lora.files import MUCH
    from .run_conversion import check_replaceable

    out, begun = Path(args.out), time.perf_counter()
    check_replaceable(out, force=args.force)
    folder = local_folder(args.model)
    check_model(folder, args.model)
    check_adapter(args.adapter)
    with open_checkpoint(folder, verify=False) as checkpoint:
        stored = torch_dtype(main_dtype(checkpoint))
    dtype = stored if args.dtype is None else getattr(torch, args.dtype)
    if args.rounding == "stochastic" and dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"--rounding stochastic needs --dtype bfloat16 or float32; the weights are {dtype}")
    say_while_waiting(f"loading {args.model}")
    model = load_model(folder, args.adapter, dtype=dtype, verify=not args.no_verify)
    lost = merge_lora(model, rounding=args.rounding, seed=args.seed)
    model.save_pretrained(out)
    seconds = round(time.perf_counter() - begun, 3)
    name = str(dtype).removeprefix("torch.")
    text = f"in {seconds:.1f} s wrote {out}: {name}; rounding lost {lost:.2g} of the adapter's changes"
    if lost > MUCH and args.rounding == "nearest":
        text += "\nnote: --dtype float32 keeps all of them, --rounding stochastic on average"
    emit(args, {"out": args.out, "dtype": name, "rounding": args.rounding, "lost": lost, "seconds": seconds}, text)
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write the adapter of `export --adapter` with the names of transformers' model."""
    from te_models.checkpoints.io.hub import local_folder
    from te_models.checkpoints.io.strict_json import read_object

    from ..lora import export_adapter

    out, begun, folder = Path(args.out), time.perf_counter(), local_folder(args.source)
    check_model(folder, args.source)
    check_adapter(args.adapter)
    if out.exists() and not args.force:
        raise ValueError(f"{out} exists; --force replaces it")
    if out.exists() and not (out / CONFIG).is_file():
        raise ValueError(f"{out} is no adapter, so --force does not replace it")
    say_while_waiting(f"loading {args.source}")
    model = load_model(folder, args.adapter, verify=not args.no_verify)
    base = args.base_model or args.source
    export_adapter(model, out, base_model=base, family=args.family)
    seconds = round(time.perf_counter() - begun, 3)
    text = f"in {seconds:.1f} s wrote {out}, an adapter of {base} for peft"
    if args.base_model is None and read_object(folder / "config.json").get("model_type") == "te_models":
        text += f"\nnote: transformers reads no te_models folder; --base-model names the folder that {base} came from"
    emit(args, {"verb": args.verb, "out": args.out, "base_model": base, "seconds": seconds}, text)
    return 0


def load_model(folder: Path, adapter: str | None, **how: Any) -> GPTModel:
    """Return the model of a folder with the adapter of another one over its layers, if there is one."""
    from .. import GPTModel

    model = GPTModel.from_pretrained(folder, **how)
    if adapter is not None:
        from ..lora import load_adapter

        load_adapter(model, adapter)
        model.eval()
    return model


def check_adapter(adapter: str | None) -> None:
    """Raise ValueError for a folder that holds no adapter."""
    if adapter is not None and not (Path(adapter) / CONFIG).is_file():
        raise ValueError(f"{adapter} has no {CONFIG}; allowed: a folder that training wrote as adapter/, or peft")


def check_model(folder: Path, named: str) -> None:
    """Raise ValueError for what is no folder of a model, one of an adapter alone; `named` as the user named it."""
    if (folder / "config.json").is_file():
        return
    if not folder.is_dir():
        raise ValueError(f"{named} is not a folder; allowed: a model folder, or a hub id as org/name")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{named} is no model folder: it has no config.json; allowed: one that has, or a hub id")
    from te_models.checkpoints.io.strict_json import read_object

    base = read_object(folder / CONFIG).get("base_model_name_or_path") or "DIR"
    raise ValueError(f"{named} is an adapter, and has no model; name its model, too: {base} --adapter {named}")
