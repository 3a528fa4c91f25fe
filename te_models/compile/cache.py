"""What torch's cache on disk keeps of a compiled model for later processes.

Unless told to, torch keeps no graph with a `torch.autograd.Function` in it, as every quantized GEMM is, and each
process traces and partitions the backward pass again: 4 s of 11 for two layers in MXFP8.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from te_models import kernels, layers

from .vector_isa import compiler_knows_all


def keeps_whole_graphs(module: torch.nn.Module) -> bool:
    """Whether graphs of a module may be kept whole: all of it is torch's or this library's. In others, a graph can call
    functions by their names alone, and torch does not look for these inside of a `torch.autograd.Function`."""
    return all(type(part).__module__.startswith(("te_models.", "torch.")) for part in module.modules())


def backend_for(module: torch.nn.Module) -> str | Callable[..., Any]:
    """Return torch.compile's backend for functions of a module: Inductor, so that it keeps whole graphs where it
    may."""
    return inductor if keeps_whole_graphs(module) else "inductor"


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph by Inductor, as torch.compile's backend "inductor" does, and let torch keep it whole.

    What a graph calls of this library, it names and does not hold, so the library's sources are part of its key.
    options: of torch's `compile_fx`.
    """
    import torch._functorch.config as functorch
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    config: Any = torch.compiler.config  # whose `patch` no type checker sees
    with (
        config.patch(cache_key_tag=f"{config.cache_key_tag}{_sources_digest()}"),
        functorch.patch(autograd_cache_allow_custom_autograd_functions=True),
        inductor_config.patch({"cpp.vec_isa_ok": True} if compiler_knows_all() else {}),
    ):
        compiled: Any = compile_fx(graph, inputs, **options)
    return compiled


@functools.cache
def _sources_digest() -> str:
    """Return the SHA-256 of the files that define what a graph calls by its name, in hexadecimal digits."""
    digest = hashlib.sha256()
    for package in (kernels, layers):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
