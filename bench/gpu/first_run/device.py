"""Part 1: the device, the software, that a kernel runs at all, and which peers can be imported."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from .. import case
from .setting import Setting
from .worker import WrongError

PEERS = {
    "torchao": "torchao",
    "liger_kernel": "liger-kernel",
    "transformer_engine": "transformer-engine",
    "flash_attn": "flash-attn",
    "transformers": "transformers",
}
"""Module -> distribution."""


def cases(setting: Setting) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield each question."""
    yield "device", partial(device, setting)
    yield "software", software
    yield "a product on the device", partial(product, setting)
    yield "a Triton kernel on the device", partial(kernel, setting)
    for module in PEERS:
        yield f"import {module}", partial(peer, module)


def device(setting: Setting) -> dict[str, Any]:
    """Describe the GPU; without one, what stands in for it."""
    cores = {"cpu_cores": os.cpu_count()}
    if setting.rehearse:
        return cores | {"says": "no GPU: a rehearsal on a CPU"}
    found = torch.cuda.get_device_properties(setting.device)
    about = {
        "name": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "free_gib": round(torch.cuda.mem_get_info()[0] / 2**30, 1),
        "shared_memory_of_a_program": getattr(found, "shared_memory_per_block_optin", None),
        "driver": _driver(),
    }
    says = ", ".join(f"{what.replace('_', ' ')} {value}" for what, value in about.items())
    return about | cores | {"says": says}


def _driver() -> int | None:
    """Return the driver's version of CUDA, such as 13000."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return None if ask is None else ask()


def software() -> dict[str, Any]:
    """Return the versions of what takes part."""
    packages = ("torch", "triton", "safetensors", "numpy", "transformers")
    found = {name: case.installed(name) for name in packages}
    found |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found | {"says": ", ".join(f"{name} {version}" for name, version in found.items())}


def product(setting: Setting) -> None:
    """Multiply two matrices."""
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    found = (x.to(setting.device) @ x.to(setting.device)).cpu().float()
    if not (found - x.float() @ x.float()).norm() <= 2.0**-7 * found.norm():
        raise WrongError("the product of two 64 x 64 matrices in bfloat16 is not the CPU's")


def kernel(setting: Setting) -> None:
    """Double a few numbers, and round them to FP8."""
    from tests.kernels.triton.tiny_kernel import cast, double

    x = torch.randn(1000, device=setting.device)
    if not torch.equal(double(x), 2 * x):
        raise WrongError("a kernel that doubles numbers does not")
    if not torch.equal(cast(x, torch.bfloat16), x.bfloat16()):
        raise WrongError("a kernel that rounds numbers to bfloat16 does not round as torch does")


def peer(module: str) -> dict[str, Any]:
    """Import a peer, which is missing where that fails for any reason."""
    try:
        importlib.import_module(module)
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        return {"missing": {module: f"{type(error).__name__}: {line[:200]}"}}
    version = case.installed(PEERS[module])
    return {"version": version, "says": f"{version}"}
