"""The verbs that make one folder of another: import, export, relayout, reshard, quantize, dequantize, upcycle, toy."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .parser import Verbs, emit, verb
from .progress import byte_progress

LAYOUTS = ("grouped", "per-gemm")
DTYPES = ("float32", "bfloat16", "float16")


def add(verbs: Verbs) -> None:
    """Add the verbs."""
    parser = _converter(
        verbs,
        "import",
        run_import,
        ("HF_DIR", "OUT"),
        "Hugging Face folder to te_models folder",
        "Read a Hugging Face model folder and write it with te_models' parameter names. Every tensor\n"
        "must be expected and present; anything else is an error and nothing is written. Quantized\n"
        "weights stay quantized, number for number; what cannot is refused, or as the options say.",
        "te-models import ./SmolLM2-135M ./smollm2",
    )
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="grouped", help="experts as one tensor, or one each (grouped)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="convert the weights (default: keep)")
    parser.add_argument("--storage", help="form of quantized weights, e.g. mxfp8 (default: the format's own)")
    parser.add_argument(
        "--allow-requantize", action="store_true", help="quantize anew what no exact form holds, and columnwise copies"
    )
    parser.add_argument("--dequantize", action="store_true", help="store the values of quantized weights")

    parser = _converter(
        verbs,
        "export",
        run_export,
        ("DIR", "HF_OUT"),
        "te_models folder to Hugging Face folder",
        "Write a folder that transformers loads with from_pretrained. Quantized weights stay quantized.",
        "te-models export ./moe ./moe-hf --family mixtral",
    )
    parser.add_argument("--family", help="architecture to write (default: the one that fits the configuration)")
    parser.add_argument("--format", help="format of quantized weights, e.g. fp8 (default: that of the original)")
    parser.add_argument(
        "--allow-requantize", action="store_true", help="quantize anew what the format cannot take over"
    )
    parser.add_argument("--dequantize", action="store_true", help="write the values of quantized weights")
    parser.add_argument("--form", help="kind of file to write, e.g. fused experts (default: that of the original)")
    parser.add_argument("--dtype", choices=DTYPES, help="convert the weights (default: keep)")

    parser = _converter(
        verbs,
        "relayout",
        run_relayout,
        ("DIR", "OUT"),
        "experts as one tensor or one each",
        "Rewrite the experts' weights between the grouped and the per-GEMM layout, bit for bit;\n"
        "quantized weights stay quantized.",
        "te-models relayout ./moe ./moe-per-gemm --layout per-gemm",
    )
    parser.add_argument("--layout", choices=LAYOUTS, required=True, help="the layout to write")

    _converter(
        verbs,
        "reshard",
        run_reshard,
        ("IN", "OUT"),
        "the same tensors in files of another size",
        "Split the weight files of a model folder of either kind, or merge them: the same tensors, bit\n"
        "for bit, in as few files of --max-shard-size as hold them.",
        "te-models reshard ./moe ./moe-one-file --max-shard-size 1TB",
    )

    parser = _converter(
        verbs,
        "quantize",
        run_quantize,
        ("DIR", "OUT"),
        "store the linear weights in FP8",
        "Store the weights of linear layers as a recipe quantizes them: the numbers that its GEMMs\n"
        "compute from bf16 weights. current and block halve the files; mxfp8 does not, because it\n"
        "scales the rows and the columns separately and keeps both.",
        "te-models quantize ./moe ./moe-fp8 --recipe mxfp8",
    )
    parser.add_argument("--recipe", required=True, help="delayed, current, block, mxfp8 or nvfp4")

    parser = _converter(
        verbs,
        "dequantize",
        run_dequantize,
        ("DIR", "OUT"),
        "quantized weights as plain numbers",
        "Write the values that the quantized weights of a folder stand for.",
        "te-models dequantize ./moe-fp8 ./moe-bf16",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: what they were before)")

    parser = _converter(
        verbs,
        "upcycle",
        run_upcycle,
        ("DIR", "OUT"),
        "dense model to mixture of experts",
        "Copy the MLP of each layer into experts and add a router. With the top-k weights\n"
        "normalised, the new model computes what the dense one did.",
        "te-models upcycle ./smollm2 ./smollm2-moe --experts 4 --topk 2",
    )
    parser.add_argument("--experts", type=int, required=True, metavar="E", help="experts in each layer")
    parser.add_argument("--topk", type=int, required=True, metavar="K", help="experts that each token uses")
    parser.add_argument("--layers", type=int, nargs="+", metavar="I", help="layers that get experts (default: all)")
    parser.add_argument(
        "--noise-std", type=float, default=0.0, metavar="S", help="noise added to each expert (0: none)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the router and the noise (0)")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="grouped", help="experts as one tensor, or one each (grouped)"
    )

    parser = _converter(
        verbs,
        "toy",
        run_toy,
        ("HF_DIR", "OUT"),
        "a few layers and experts of a model, for tests",
        "Write a Hugging Face folder with the first layers of another and their first experts, byte for\n"
        "byte: a small model with the real names, dtypes, forms and values.",
        "te-models toy ./Qwen3-30B-A3B ./toy --layers 2 --experts 4",
    )
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="layers to keep (2)")
    parser.add_argument("--experts", type=int, metavar="E", help="experts to keep in each layer (default: all)")


def _converter(
    verbs: Verbs,
    name: str,
    run: Callable[[argparse.Namespace], int],
    folders: tuple[str, str],
    summary: str,
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    parser = verb(verbs, name, run, summary, description, example)
    parser.add_argument("source", metavar=folders[0], help="the folder to read")
    parser.add_argument("out", metavar=folders[1], help="the folder to write")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    parser.add_argument("--force", action="store_true", help="replace an existing model folder at the output")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", type=parse_size, default="5GB", help="of a weight file, e.g. 500MB (5GB)"
    )
    return parser


def parse_size(text: str) -> int:
    """Return a number of bytes: `5GB` (10^9), `5GiB` (2^30), or plain digits."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", text.strip().lower())
    if match is None or (match[3] and not match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 5GB, 500MB or 2GiB")
    base = 1024 if match[3] else 1000
    size = int(float(match[1]) * base ** " kmgt".index(match[2] or " "))
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive size")
    return size


def run_import(args: argparse.Namespace) -> int:
    """Hugging Face folder to ours."""
    from te_models.checkpoints import import_hf

    options = {"storage": args.storage, "allow_requantize": args.allow_requantize, "dequantize": args.dequantize}
    return _convert(args, import_hf, dtype=_dtype(args), layout=args.layout, **options)


def run_export(args: argparse.Namespace) -> int:
    """Our folder to a Hugging Face one."""
    from te_models.checkpoints import export_hf

    options = {"family": args.family, "form": args.form, "format": args.format}
    options |= {"allow_requantize": args.allow_requantize, "dequantize": args.dequantize}
    return _convert(args, export_hf, dtype=_dtype(args), **options)


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
    from te_models.layers import recipe

    return _convert(args, quantize, recipe=recipe(args.recipe))


def run_dequantize(args: argparse.Namespace) -> int:
    """Quantized weights as plain ones."""
    from te_models.checkpoints import dequantize

    return _convert(args, dequantize, dtype=_dtype(args))


def run_upcycle(args: argparse.Namespace) -> int:
    """A dense model as a mixture of experts."""
    from te_models.checkpoints import upcycle

    options = {"layers": args.layers, "noise_std": args.noise_std, "seed": args.seed, "layout": args.layout}
    return _convert(args, upcycle, num_experts=args.experts, topk=args.topk, **options)


def run_toy(args: argparse.Namespace) -> int:
    """A small part of a Hugging Face folder."""
    from te_models.checkpoints import toy

    return _convert(args, toy, layers=args.layers, experts=args.experts)


def _dtype(args: argparse.Namespace) -> Any:
    import torch

    return None if args.dtype is None else getattr(torch, args.dtype)


def _convert(args: argparse.Namespace, function: Callable[..., Any], **options: Any) -> int:
    """Run one conversion with progress and print what it did."""
    out, start = Path(args.out), time.perf_counter()
    _check_replaceable(out, force=args.force)
    with byte_progress(args.verb) as progress:
        options |= {"overwrite": args.force, "dry_run": args.dry_run, "max_shard_bytes": args.max_shard_size}
        plan = function(args.source, out, progress=progress, **options)
    result = {
        "verb": args.verb,
        "source": args.source,
        "out": args.out,
        "dry_run": args.dry_run,
        "seconds": round(time.perf_counter() - start, 3),
        "plan": plan.to_dict(),
    }
    did = "would write" if args.dry_run else f"in {result['seconds']:.1f} s wrote"
    text = f"{did} {out}: {len(plan.outputs)} tensors, {plan.total_bytes / 2**20:.1f} MiB"
    if plan.carried:
        text += f"\nkept {len(plan.carried)} tensors that the model does not use"
    if plan.ignored:
        text += f"\nleft out {', '.join(plan.ignored[:4])}" + (" ..." if len(plan.ignored) > 4 else "")
    about = [str(plan)] if args.dry_run else []
    about += [] if plan.report is None else [str(plan.report)]
    emit(args, result, "\n".join([*about, text]))
    return 0


def _check_replaceable(out: Path, *, force: bool) -> None:
    """Only a model folder is ever replaced, whatever the user typed for OUT."""
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not force:
        raise ValueError(f"{out} exists; --force replaces it")
    if not (out / "config.json").is_file():
        raise ValueError(f"{out} is not a model folder, so --force does not replace it")
