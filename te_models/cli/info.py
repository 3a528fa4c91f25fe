"""`te-models info`: what is installed here and what it can do."""

import argparse
import importlib.metadata
import platform
import textwrap
from typing import Any

from ..extras import EXTRAS, installed
from ..sizes import plural
from ..terminal import TextTable, say_while_waiting
from .parser import Verbs, emit, help_width, needs, verb

PACKAGES = (
    "te_models",
    "torch",
    "safetensors",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "accelerate",
    "compressed-tensors",
    "triton",
    "rich",
    "shtab",
    "matplotlib",
    "gguf",
)

RECIPES = {
    "delayed": "FP8, one scale per tensor from the amaxes of earlier steps",
    "current": "FP8, one scale per tensor from its own amax",
    "block": "FP8, a scale per 1x128 block of activations and per 128x128 block of weights",
    "mxfp8": "FP8, a power-of-two scale per 32 values",
    "nvfp4": "FP4, an FP8 scale per 16 values and a float32 scale per tensor",
    "custom": "formats of your own, from Python only (CustomRecipe)",
    "per_module": "recipes of layers by name, from Python only (PerModuleRecipe)",
}
"""What each recipe does, in a line."""

DYNAMIC = {"auto": None, "always": True, "never": False}


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "info",
        run,
        "versions, devices, recipes, families and extras; what the compiler makes of a model",
        "Show versions, devices, number formats, model families and which extras are installed; with\n"
        "--keys, the keys of the model configuration; with --compile-report, which graphs torch.compile\n"
        "makes of a model, what is in them, where they break, and what is compiled again and why.",
        "te-models info --compile-report ./moe --recipe mxfp8",
    )
    parser.add_argument(
        "--keys",
        metavar="PART",
        nargs="?",
        const="",
        help="list the keys of the model configuration, or of one part such as moe",
    )
    parser.add_argument("--compile-report", metavar="DIR", help="a model folder to compile")
    report = parser.add_argument_group("with --compile-report")
    report.add_argument("--recipe", metavar="NAME", help="compile under this recipe")
    report.add_argument("--mode", choices=("whole", "block"), help="what is compiled as one (default: whole)")
    report.add_argument(
        "--dynamic",
        choices=tuple(DYNAMIC),
        help="compile for all shapes: when one changes, at once, or never (default: auto)",
    )
    report.add_argument("--no-verify", action="store_true", help="do not check the weights against manifest.json")
    report.add_argument("--activation-checkpointing", action="store_true", help="recompute layers in the backward")


def run(args: argparse.Namespace) -> int:
    """Print what there is; 1 if a compile report has breaks."""
    of_report = ("recipe", "mode", "dynamic", "activation_checkpointing", "no_verify")
    needs(args, () if args.compile_report and args.keys is None else of_report, "--compile-report DIR")
    if args.keys is not None:
        needs(args, ("compile_report",), "no --keys")
        from ..config import ModelConfig
        from ..config.keys import tables_of
        from .training.keys import keys_json, keys_text, select_tables

        tables = select_tables(list(tables_of(ModelConfig)), args.keys, "--keys")
        emit(args, {"keys": keys_json(tables)}, keys_text(tables))
        return 0
    if args.compile_report:
        return _compile_report(args)
    result = collect()
    extras = [(n, "installed" if here else f"pip install 'te_models[{n}]'") for n, here in result["extras"].items()]
    emit(
        args,
        result,
        TextTable([("python", result["python"]), *((n, v or "-") for n, v in result["versions"].items())], "versions"),
        TextTable([row for d in result["devices"] for row in _device_rows(d)], "devices"),
        TextTable(list(result["recipes"].items()), "recipes"),
        "Hugging Face families",
        textwrap.fill(", ".join(result["families"]), help_width(), initial_indent="  ", subsequent_indent="  "),
        TextTable(extras, "extras"),
    )
    return 0


def collect() -> dict[str, Any]:
    """Return the information as plain JSON values."""
    from te_models.checkpoints import FAMILIES
    from te_models.layers.recipe import base

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "recipes": {name: RECIPES[name] for name in base.RECIPES},
        "families": sorted(FAMILIES),
        "extras": {name: installed(name) for name in EXTRAS},
    }


def _compile_report(args: argparse.Namespace) -> int:
    from functools import partial

    from te_models.layers import recipe

    from ..compile.report import compile_report
    from ..model import GPTModel

    if args.recipe:
        recipe(args.recipe)  # an unknown name is refused before the model is read
    say_while_waiting(f"loading {args.compile_report} and compiling it; this can take minutes")
    model = GPTModel.from_pretrained(args.compile_report, verify=not args.no_verify)
    model.activation_checkpointing = args.activation_checkpointing
    make_recipe = partial(recipe, args.recipe) if args.recipe else None
    report = compile_report(model, make_recipe, mode=args.mode or "whole", dynamic=DYNAMIC[args.dynamic or "auto"])
    calls = [(call["call"], str(call["shape"]), str(call["graphs"])) for call in report["calls"]]
    lines: list[str | TextTable] = [TextTable([("call", "shape", "graphs"), *calls], heading=True)]
    lines += [f"{_program(p)} of: {call['call']}" for call in report["calls"] for p in call["programs"]]
    lines += [f"compiled again, {call['call']}: {why}" for call in report["calls"] for why in call["reasons"]]
    lines += [f"break, {plural(count, 'time')}: {why}" for why, count in report["breaks"].items()]
    lines.append(f"{plural(report['graphs'], 'graph')}, {plural(sum(report['breaks'].values()), 'break')}")
    emit(args, report, *lines)
    return 1 if report["breaks"] else 0


def _program(program: dict[str, Any]) -> str:
    """Describe a compiled program in a line."""
    registered = ", ".join(f"{count} {name}" for name, count in program["registered"].items())
    count = plural(program["operations"], "operation")
    return f"{program['pass']}, {count}" + (f" with {registered}" if registered else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    from te_models.kernels.gemm.cpu import automatic_choice

    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    gemm, why = automatic_choice()
    detail = f"{platform.machine()}, {capability}, {plural(threads, 'thread')}; "
    detail += f"16-bit matrices are multiplied in {gemm}: {why}"
    found = [{"name": "cpu", "detail": detail, "threads": threads, "gemm": gemm}]
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        memory = p.total_memory / 2**30
        detail = f"{p.name}, {memory:.0f} GiB, compute capability {p.major}.{p.minor}"
        found.append({"name": f"cuda:{index}", "detail": detail, "memory_bytes": p.total_memory})
    return found


def _device_rows(device: dict[str, Any]) -> list[tuple[str, str]]:
    """A line of the table for each part of what is said of a device."""
    first, *others = device["detail"].split("; ")
    return [(device["name"], first), *(("", other) for other in others)]
