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
    "triton",
    "tyro",
    "tqdm",
    "matplotlib",
    "gguf",
)


def add(verbs: Verbs) -> None:
    """Add the verb."""
    verb(
        verbs,
        "info",
        run,
        "versions, devices, recipes, families and extras",
        "Show versions, devices, number formats, model families and which extras are installed.",
        "te-models info --json",
    )


def run(args: argparse.Namespace) -> int:
    """Print what there is."""
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
    from te_models.layers.recipe import RECIPES

    return {name: (cls.__doc__ or "").partition("\n")[0] for name, cls in RECIPES.items()}


def _families() -> list[str]:
    from te_models.checkpoints import FAMILIES

    return sorted(FAMILIES)
