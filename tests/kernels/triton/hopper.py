"""Compile a Triton kernel for compute capability 9.0 without such a GPU: types, shared memory and instructions.

Triton's interpreter does not type-check a kernel, nor say whether it fits. Compiling needs the real decorator, so it
happens in a child process without TRITON_INTERPRET, started by the tests as `python -m tests.kernels.triton.hopper`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

SHARED_MEMORY = 232448  # bytes one program can have


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int) -> Any:
    """Compile; types: of arguments that are not constants. Pointers and arguments not named *_1 divide by 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = types[name]
            if types[name].startswith("*") or name not in ("M", "G", "T"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})


def summary(compiled: Any) -> dict[str, int]:
    """Return what tells whether the tensor cores are used asynchronously, and whether the program fits."""
    ptx = compiled.asm["ptx"]
    return {
        "shared": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "copies": ptx.count("cp.async.c"),
        "local": ptx.count("ld.local"),
    }


def in_child(module: str) -> dict[str, dict[str, int]]:
    """Run `module` as a program that prints {name: summary} as JSON, without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-m", module], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)
