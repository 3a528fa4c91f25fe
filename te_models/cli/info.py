"""`te-models info`: what is installed here and what it can do."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

from ..extras import EXTRAS, installed
from .parser import Verbs, emit, table, verb

PACKAGES = (
    "te_models",
    "torch",
    "safetensors",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "accelerate",
    "triton",
    "tyro",
    "tqdm",
    "matplotlib",
    "gguf",
)

DYNAMIC = {"auto": None, "always": True, "never": False}


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "info",
        run,
        "versions, devices, recipes, families and extras; what the compiler makes of a model",
        "Show versions, devices, number formats, model families and which extras are installed; or, with\n"
        "--compile-report, which graphs torch.compile makes of a model, what is in them, where they break,\n"
        "and what is compiled again and why.",
        "te-models info --compile-report ./moe --recipe mxfp8",
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
    report.add_argument("--activation-checkpointing", action="store_true", help="recompute layers in the backward")


def run(args: argparse.Namespace) -> int:
    """Print what there is; 1 if a compile report has breaks."""
    if args.compile_report:
        return _compile_report(args)
    for option in ("recipe", "mode", "dynamic", "activation_checkpointing"):
        if getattr(args, option):
            raise ValueError(f"--{option.replace('_', '-')} needs --compile-report DIR")
    result = collect()
    sections = [
        table([("python", result["python"]), *((n, v or "-") for n, v in result["versions"].items())], "  "),
        table([(d["name"], d["detail"]) for d in result["devices"]], "  "),
        table([(n, text) for n, text in result["recipes"].items()], "  "),
        "  " + ", ".join(result["families"]),
        table(
            [(n, "installed" if here else f"pip install 'te_models[{n}]'") for n, here in result["extras"].items()],
            "  ",
        ),
    ]
    titles = ("versions", "devices", "FP8 recipes", "Hugging Face families", "extras")
    emit(args, result, "\n".join(f"{title}\n{section}" for title, section in zip(titles, sections, strict=True)))
    return 0


def collect() -> dict[str, Any]:
    """Return the information as plain JSON values."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "recipes": _recipes(),
        "families": _families(),
        "extras": {name: installed(name) for name in EXTRAS},
    }


def _compile_report(args: argparse.Namespace) -> int:
    from functools import partial

    from te_models.layers import recipe

    from ..compile.report import compile_report
    from ..model import GPTModel

    if args.recipe:
        recipe(args.recipe)  # an unknown name is refused before the model is read
    model = GPTModel.from_pretrained(args.compile_report)
    model.activation_checkpointing = args.activation_checkpointing
    made = partial(recipe, args.recipe) if args.recipe else None
    report = compile_report(model, made, mode=args.mode or "whole", dynamic=DYNAMIC[args.dynamic or "auto"])
    lines = [
        table([("call", "shape", "graphs"), *((c["call"], str(c["shape"]), str(c["graphs"])) for c in report["calls"])])
    ]
    lines += [f"{_program(p)} of: {call['call']}" for call in report["calls"] for p in call["programs"]]
    lines += [f"compiled again, {call['call']}: {why}" for call in report["calls"] for why in call["reasons"]]
    lines += [f"break, {count} times: {why}" for why, count in report["breaks"].items()]
    lines.append(f"{report['graphs']} graphs, {sum(report['breaks'].values())} breaks")
    emit(args, report, "\n".join(lines))
    return 1 if report["breaks"] else 0


def _program(program: dict[str, Any]) -> str:
    """Describe a compiled program in a line."""
    registered = ", ".join(f"{count} {name}" for name, count in program["registered"].items())
    return f"{program['pass']}, {program['operations']} operations" + (f" with {registered}" if registered else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    found = [{"name": "cpu", "detail": f"{platform.machine()}, {capability}, {threads} threads", "threads": threads}]
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        memory = p.total_memory / 2**30
        detail = f"{p.name}, {memory:.0f} GiB, compute capability {p.major}.{p.minor}"
        found.append({"name": f"cuda:{index}", "detail": detail, "memory_bytes": p.total_memory})
    return found


def _recipes() -> dict[str, str]:
    from te_models.layers.recipe.base import RECIPES

    return {name: (cls.__doc__ or "").partition("\n")[0] for name, cls in RECIPES.items()}


def _families() -> list[str]:
    from te_models.checkpoints import FAMILIES

    return sorted(FAMILIES)
