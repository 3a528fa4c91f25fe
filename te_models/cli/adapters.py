"""Adapters for the verbs that run models (`--adapter`), and `te-models merge`, to add one to the weights."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_models.checkpoints.io.model_folder import ADAPTER, check_model_folder

from ..terminal import say_while_waiting
from .parser import Verbs, dtype, emit, integer, needs, verb

if TYPE_CHECKING:
    from ..model import GPTModel

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

    if args.rounding != "stochastic":
        needs(args, ("seed",), "--rounding stochastic")
    out, begun = Path(args.out), time.perf_counter()
    check_replaceable(out, force=args.force)
    folder = local_folder(args.model)
    check_model_folder(folder, args.model)
    args.adapter = adapter_folder(args.adapter)
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


def run_adapter_export(args: argparse.Namespace) -> int:
    """Write the adapter of `export --adapter` with the names of transformers' model."""
    from te_models.checkpoints.io.hub import local_folder
    from te_models.checkpoints.io.strict_json import read_object

    from ..lora import export_adapter

    out, begun, folder = Path(args.out), time.perf_counter(), local_folder(args.source)
    check_is_model(folder, args.source)
    args.adapter = adapter_folder(args.adapter)
    if out.exists() and not args.overwrite:
        raise ValueError(f"{out} exists; --force replaces it")
    if out.exists() and not (out / ADAPTER).is_file():
        raise ValueError(f"{out} is no adapter, so --force does not replace it")
    say_while_waiting(f"loading {args.source}")
    model = load_model(folder, args.adapter, verify=args.verify)
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


def adapter_folder(adapter: str | None) -> str | None:
    """Return the folder of an adapter: a path, or a hub id. Raises ValueError for one that holds no adapter."""
    if adapter is None:
        return None
    from te_models.checkpoints.io.hub import local_folder

    folder = local_folder(adapter)
    if (folder / ADAPTER).is_file():
        return str(folder)
    own = Path(adapter) / "adapter"
    there = f"the adapter of this run is {own}" if (own / ADAPTER).is_file() else ""
    there = there or "allowed: a folder that training wrote as adapter/, or peft, or a hub id"
    raise ValueError(f"{adapter} has no {ADAPTER}; {there}")


def check_is_model(folder: Path, named: str) -> None:
    """Raise ValueError for what is no folder of a model, `named` as the user named it; the sentence for an adapter
    names the verb's --adapter."""
    from te_models.checkpoints.io.model_folder import base_of_adapter, is_adapter

    if is_adapter(folder):
        base = base_of_adapter(folder)
        raise ValueError(f"{named} is an adapter, and has no model; name its model, too: {base} --adapter {named}")
    check_model_folder(folder, named)
